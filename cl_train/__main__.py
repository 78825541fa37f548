"""`python -m cl_train <command> ...` is `cl-train <command> ...`."""

from cl_train.cli import program

if __name__ == "__main__":
    program()
