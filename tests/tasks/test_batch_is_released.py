"""A step keeps of its images what backward needs: the 16-bit ones, not the source's FP32 ones."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from mprun.execution.graphed_step import GraphedStep
from mprun.precision import get_policy
from mprun.tasks.supervised import Classification

from ..execution.call_recorder import CallRecorder
from ..helpers import TINY_GAN

NARROW = ["model=vgg16", "model.width=0.0625", "data=digits_32", "data.batch_size=2"]
MODELS = {"vgg16": NARROW, "dcgan": TINY_GAN}


class Watched:
    """A source that remembers whether its last FP32 images are still alive."""

    def __init__(self, source):
        self.source, self.images = source, None

    def __getattr__(self, name):
        return getattr(self.source, name)

    def train_batch(self, index):
        images, labels = self.source.train_batch(index)
        self.images = weakref.ref(images)
        return images, labels


@pytest.mark.parametrize("model", MODELS)
def test_fp32_images_are_gone_in_a_mode_with_16_bit_weights(build_run, model):
    built = build_run(*MODELS[model], "precision=fp16_master_scaled")
    _assert_released(built, built.task.train_step, "forward")


@pytest.mark.parametrize("recorded", [False, True])
def test_autocasts_fp32_images_are_gone_in_backward(build_run, recorded):
    built = build_run(*NARROW, "precision=amp")
    take = built.task.train_step
    if recorded:  # the eager steps before a recording hold a list of micro-batches
        take = GraphedStep(built.task, CallRecorder(), required=True).step
    _assert_released(built, take, "backward")


def _assert_released(built, take, phase):
    task = built.task
    source = task.data = Watched(task.data)
    alive = []

    def look(*_):
        alive.append(source.images() is not None)

    first = next(iter(task.learners.values()))
    layer = [module for module in first.model.modules() if not list(module.children())][-1]
    if phase == "forward":
        layer.register_forward_pre_hook(look)
    else:
        layer.register_full_backward_hook(look)
    take(0, False)
    assert alive == [False]


def test_the_layout_is_that_of_a_batch_put_in_order_and_then_cast():
    """Images of one channel keep their strides: with others a convolution rounds differently."""
    for channels in (1, 3):
        images = torch.randn(2, channels, 4, 4)
        source = SimpleNamespace(train_batch=lambda index, images=images: (images, None))
        task = Classification.__new__(Classification)
        task.data, task.channels_last, task.policy = source, True, get_policy("fp16_naive")
        ((taken, _),) = task.load(0)
        expected = images.contiguous(memory_format=torch.channels_last).half()
        assert torch.equal(taken, expected) and taken.stride() == expected.stride()
