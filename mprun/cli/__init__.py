"""The command `mprun`: verbs, Hydra's keys, exit codes; one file for each verb."""

from mprun.cli.dispatch import main

__all__ = ["main"]
