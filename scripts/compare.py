from from_checkout import run

if __name__ == "__main__":
    run("compare")
