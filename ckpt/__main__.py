"""`python -m ckpt`, for when another package's `ckpt` command comes first on the PATH."""

from ckpt.cli import main

if __name__ == "__main__":
    main(prog_name="ckpt")
