#!/usr/bin/env bash
# bash scripts/train.sh [train.py's arguments]: installs the project into .venv if necessary, then trains.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec .venv/bin/python train.py "$@"
