"""`python -m migrate`: the same as the command `migrate`."""

from __future__ import annotations

from migrate.cli import main

if __name__ == "__main__":
    main(prog_name="migrate")
