"""The command `mprun`: verbs, Hydra's keys, exit codes. A file a verb."""

from mprun.cli.dispatch import main

__all__ = ["main"]
