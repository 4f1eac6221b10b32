"""Sources for tests/data/test_every_source.py: of a folder, what makes each with options."""

from ...data.made_images import bound
from ...helpers import configured
from . import test_sentence_pairs

NAMES = {"max_length": 16, "vocab_multiple": 8, "batch_size": 5, "device": "cpu"}
SOURCES = {
    "names": lambda _: lambda **more: configured("unicode_names", **NAMES | more),
    "parallel text": lambda root: bound(test_sentence_pairs.source, test_sentence_pairs.made(root)),
}
