"""`python -m mprun` is the command `mprun`."""

from mprun.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
