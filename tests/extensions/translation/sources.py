"""Sources for tests/data/test_every_source.py: of a folder, what makes each with options."""

from mprun.extensions.translation.sentence_pairs import UnicodeNames

from ...data.made_images import bound
from . import test_sentence_pairs

NAMES = {"max_length": 16, "vocab_multiple": 8, "batch_size": 5, "device": "cpu"}
SOURCES = {
    "names": lambda _: lambda **more: UnicodeNames(**NAMES | more),
    "parallel text": lambda root: bound(test_sentence_pairs.source, test_sentence_pairs.made(root)),
}
