"""Sources that yield batches, all of one shape: `mprun.data.source.Source` is their interface."""

from mprun.data.dataset_source import DatasetSource
from mprun.data.image_store import DigitsImages, SyntheticImages, load_digits
from mprun.data.source import DataError, permutation
from mprun.data.text import DocsText
from mprun.data.token_streams import SyntheticTokens, TokenSource

__all__ = [
    "DataError",
    "DatasetSource",
    "DigitsImages",
    "DocsText",
    "SyntheticImages",
    "SyntheticTokens",
    "TokenSource",
    "load_digits",
    "permutation",
]
