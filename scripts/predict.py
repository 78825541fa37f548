"""`cl-train predict` from a checkout that is not installed."""

from from_checkout import run

if __name__ == "__main__":
    run("predict")
