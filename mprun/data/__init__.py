"""Sources that yield batches, all of one shape.

A source has ``batches_per_epoch``, ``samples_per_batch`` (images or tokens), ``sha256`` (hex, of
the raw content) and ``description`` (plain values). ``train_batch(index)`` counts batches over the
whole run, so that the epoch is ``index // batches_per_epoch``; its content depends on the seed and
the index alone, never on earlier calls or global random state. ``eval_batches()`` walks the
held-out split in a fixed order. Batches lie on the source's device.
"""

from mprun.data.dataset_source import DatasetSource
from mprun.data.docs_text import DocsText
from mprun.data.image_store import DigitsImages
from mprun.data.source import DataError, permutation
from mprun.data.synthetic import SyntheticImages, SyntheticTokens
from mprun.data.token_streams import TokenSource

__all__ = [
    "DataError",
    "DatasetSource",
    "DigitsImages",
    "DocsText",
    "SyntheticImages",
    "SyntheticTokens",
    "TokenSource",
    "permutation",
]
