"""`python -m cl_train <command> ...` is `cl-train <command> ...`."""

import sys

from cl_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
