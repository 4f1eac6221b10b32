"""Sources for tests/data/test_every_source.py: of a folder, what makes each with options."""

from ...data.made_images import bound
from ...helpers import configured
from . import test_speech_data

SOURCES = {
    "digit strips": lambda _: (
        lambda **more: configured("digit_strips", **{"batch_size": 5, "device": "cpu"} | more)
    ),
    "speech": lambda root: bound(test_speech_data.source, test_speech_data.corpus(root)),
}
