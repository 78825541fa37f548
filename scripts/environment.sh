# Sourced by the other scripts: creates .venv once and installs the project into it, showing progress.
# PYTHON selects another interpreter (3.11 to 3.13); EXTRAS=dev adds the dependencies of tests and checks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}

stamp=.venv/.installed${EXTRAS:+-$EXTRAS}
wanted=$(cat pyproject.toml constraints.txt | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
        echo "Python 3.11 to 3.13 is needed, found $("$PYTHON" --version); set PYTHON=/path/to/python3.12" >&2
        exit 2
    }
    echo "Installing into .venv; PyTorch is several GB, so this takes minutes the first time ..." >&2
    quiet=-q # an update says little
    [ -x .venv/bin/python ] || { quiet=; "$PYTHON" -m venv .venv; }
    .venv/bin/python -m pip install $quiet --disable-pip-version-check -c constraints.txt -e ".${EXTRAS:+[$EXTRAS]}" >&2
    echo "$wanted" >"$stamp"
    echo "$wanted" >.venv/.installed # an extra includes the base
fi
