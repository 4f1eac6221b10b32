"""Sources for tests/data/test_every_source.py: of a folder, what makes each with options."""

from functools import partial

from ...helpers import configured
from . import test_sentence_pairs

NAMES = {"max_length": 16, "vocab_multiple": 8, "batch_size": 5, "device": "cpu"}
SOURCES = {
    "names": lambda _: partial(configured, "unicode_names", **NAMES),
    "parallel text": lambda root: partial(
        test_sentence_pairs.source, test_sentence_pairs.made(root)
    ),
}
