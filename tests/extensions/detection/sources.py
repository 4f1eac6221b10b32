"""Sources for tests/data/test_every_source.py: of a folder, what makes each with options."""

from ...data.made_images import bound
from ...helpers import configured
from . import test_coco, test_voc

SOURCES = {
    "digit canvases": lambda _: (
        lambda **more: configured("digit_canvases", **{"batch_size": 5, "device": "cpu"} | more)
    ),
    "coco": lambda root: bound(test_coco.coco, test_coco.made(root)),
    "voc": lambda root: bound(test_voc.voc, test_voc.made(root)),
}
