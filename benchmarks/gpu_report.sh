#!/usr/bin/env bash
# bash benchmarks/gpu_report.sh [out=DIR] [time_limit_s=520] [groups=NAME,...]: measures this machine's GPU.
# bash benchmarks/gpu_report.sh dry_run=true [out=DIR]: a test on a CPU with tiny settings; its figures are meaningless.
# Installs nothing: uses $PYTHON, else .venv, else python3. timm, pytest and Nsight Compute's ncu are used if installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
exec "$PYTHON" -m benchmarks.gpu_report "$@"
