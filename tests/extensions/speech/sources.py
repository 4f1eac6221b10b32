"""Sources for tests/data/test_every_source.py: of a folder, what makes each with options."""

from functools import partial

from ...helpers import configured
from . import test_speech_data

SOURCES = {
    "digit strips": lambda _: partial(configured, "digit_strips", batch_size=5, device="cpu"),
    "speech": lambda root: partial(test_speech_data.source, test_speech_data.corpus(root)),
}
