"""What a source raises when the data themselves are at fault."""

from mprun.errors import Damaged


class DataError(ValueError):
    """Data are missing or too few for the batch asked for."""


class DamagedData(Damaged, DataError):
    """A file that cannot be used as it is; the message names it. Ends a run with exit code 4."""
