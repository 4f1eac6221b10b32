"""Sources for tests/data/test_every_source.py: of a folder, what makes each with options."""

from functools import partial

from ...helpers import configured
from . import test_coco, test_voc

SOURCES = {
    "digit canvases": lambda _: partial(configured, "digit_canvases", batch_size=5, device="cpu"),
    "coco": lambda root: partial(test_coco.coco, test_coco.made(root)),
    "voc": lambda root: partial(test_voc.voc, test_voc.made(root)),
}
