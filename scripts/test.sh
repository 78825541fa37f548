#!/usr/bin/env bash
# bash scripts/test.sh [pytest's arguments]: installs the project into .venv if necessary, then runs the tests.
# bash scripts/test.sh --faults [pytest's arguments]: the fault suite with its full counts (see docs/reliability.md).
export EXTRAS=dev
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [ "${1:-}" = --faults ]; then
    shift
    exec .venv/bin/python -m pytest tests/faults --full -rA "$@"
fi
# Three processes on two cores, because many tests wait; a file stays in one. Later arguments win: -n 0 is one process.
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
