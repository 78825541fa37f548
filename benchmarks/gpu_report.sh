#!/usr/bin/env bash
# bash scripts/gpu_report.sh [folder=DIR] [seconds=520] [groups=NAME,...]: every measurement on the GPU at hand, one call.
# bash scripts/gpu_report.sh --dry-run [folder=DIR]: the same to its end on a CPU, tiny; its figures mean nothing.
# Installs nothing: uses $PYTHON, else .venv, else python3, with PYTHONPATH as it is. Needs what pyproject.toml names; timm,
# pytest and Nsight Compute's ncu (for the bytes) where they are installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
words=()
for word in "$@"; do
    [ "$word" = --dry-run ] && word=dry_run=true
    words+=("$word")
done
exec "$PYTHON" -m benchmarks.gpu_report ${words[@]+"${words[@]}"}
