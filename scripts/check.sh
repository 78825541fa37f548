#!/usr/bin/env bash
# bash scripts/check.sh: lint, format, types, the import order of the packages, the size of the rooms, the private names of torch, and the forms of the repository; `--fix` fixes what can be fixed automatically.
export EXTRAS=dev
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [ "${1:-}" = --fix ]; then
    .venv/bin/ruff check --fix .
    .venv/bin/ruff format .
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
.venv/bin/python scripts/room_budgets.py
.venv/bin/python scripts/private_names.py
.venv/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
.venv/bin/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/{bug,slow_layout}.yml
.venv/bin/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
