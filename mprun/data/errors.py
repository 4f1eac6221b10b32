"""What a source raises when the data themselves are at fault."""


class DataError(ValueError):
    """Data are missing, damaged, or too few for the batch asked for."""
