#!/usr/bin/env bash
# bash scripts/docs.sh: builds the site from docs/ into site/; a warning is an error.
export EXTRAS=docs
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
rm -rf site
.venv/bin/python -m sphinx --fail-on-warning --keep-going --quiet -d .venv/doctrees -b html docs site
echo "built: site/index.html"
