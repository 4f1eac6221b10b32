"""Published and hand-counted figures of the four models against the count.

Reference values were counted once with meta tensors, for an H200 at 790 / 395 / 55 to 60 TFLOP/s
(FP16 / TF32 / FP32) and 4.3 TB/s, forward and backward without the update. They have two to three
digits, so 1.5 % is the tolerance, and every rule that differs is put back by name below.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mprun.extensions.bench.roofline.count import count
from mprun.extensions.bench.roofline.limits import GPUS, limit
from mprun.models.classifiers import AlexNet2012

IMAGENET = ("data=synthetic_images", "data.image_size=224", "data.num_classes=1000")
WORDS = ("data=synthetic_tokens", "data.vocab_size=793472", "data.sequence_length=20")
MODELS = {
    "resnet50": ("model=resnet50", "optim=sgd", *IMAGENET, "data.batch_size=256"),
    "alexnet": ("model=alexnet", "optim=sgd_alexnet", *IMAGENET, "data.batch_size=1024"),
    "alexnet_2012": ("model=alexnet_2012", "optim=sgd_alexnet", *IMAGENET, "data.batch_size=1024"),
    "dcgan": ("model=dcgan", "data.image_size=64", "data.batch_size=128"),
    "biglstm": ("model=biglstm", "model.vocab_size=793472", *WORDS, "data.batch_size=256"),
}
# The reference gives inputs in the mode's dtype, and does not see that ATen adds the bias of a
# convolution, and sums its gradient, in kernels of their own.
NOT_IN_REFERENCE = ("cast", "convolution bias", "convolution bias gradient")
# Between the backward pass and the update: gradients of weights, which are unscaled and checked.
NOT_IN_REFERENCE += ("mul", "unscale and check")
GIVEN = pytest.approx


@cache
def counted(model, mode="fp16_master"):
    return count(MODELS[model], mode)


def without_update(rows, drop=()):
    return [row for row in rows if row.phase != "update" and row.kind not in drop]


def rate(found, rows, ceilings=GPUS["H200"]):
    seconds = (max(row.seconds(ceilings.flops, ceilings.bandwidth)) for row in rows)
    return found.samples / sum(seconds)


def megabytes(found, rows):
    return sum(row.bytes for row in rows) / found.samples / 1e6


def gigaflops(found, phase=None):
    return sum(r.flops for r in found.rows if phase in (None, r.phase)) / found.samples / 1e9


@pytest.mark.slow
def test_resnet50_parameters_and_flops():
    found = counted("resnet50")
    assert found.parameters == 25_557_032  # torchvision's documentation
    # 4.09 billion multiply-adds, torchvision's documentation; all but the first layer have the
    # gradient of their input too.
    assert gigaflops(found, "forward") == GIVEN(2 * 4.09, rel=0.002)
    stem = 2 * 112 * 112 * 64 * 3 * 49 / 1e9
    assert gigaflops(found) == GIVEN(3 * gigaflops(found, "forward") - stem, rel=1e-6)


@pytest.mark.slow
def test_resnet50_traffic_by_kind():
    found = counted("resnet50")
    rows = without_update(found.rows, NOT_IN_REFERENCE)
    assert megabytes(found, rows) == GIVEN(480, rel=0.015)
    fp32 = counted("resnet50", "fp32")
    assert megabytes(fp32, without_update(fp32.rows)) == GIVEN(956, rel=0.015)
    for kinds, reference in (
        (("batch norm", "batch norm backward"), 178),
        (("convolution", "convolution backward", "convolution weight gradient"), 129),
        (("relu backward",), 58),
        (("relu",), 38),
        (("gradient add",), 34),
        (("residual add",), 33),
    ):
        of_kinds = megabytes(found, [row for row in rows if row.kind in kinds])
        assert of_kinds == GIVEN(reference, abs=0.6), kinds


@pytest.mark.parametrize("mode, reference", [("fp16_master", 8120), ("tf32", 4070), ("amp", 8120)])
@pytest.mark.slow
def test_resnet50_limits(mode, reference):
    found = counted("resnet50", mode)
    assert rate(found, without_update(found.rows)) == GIVEN(reference, rel=0.015)
    assert limit(found, GPUS["H200"])["memory_bound_share"] == GIVEN(0.82, abs=0.01)


@pytest.mark.slow
def test_resnet50_fp32_limit_between_those_of_55_and_60_tflops():
    found = counted("resnet50", "fp32")
    for fp32, reference in ((55e12, 1660), (60e12, 1760)):
        ceilings = replace(GPUS["H200"], flops={"fp32": fp32})
        assert rate(found, without_update(found.rows), ceilings) == GIVEN(reference, rel=0.015)
    assert limit(found, GPUS["H200"])["memory_bound_share"] == GIVEN(0.29, abs=0.015)


@pytest.mark.slow
def test_resnet50_fused_limit():
    found = counted("resnet50")
    # The reference lets the second gradient of a residual be added for nothing; here it is read.
    free = {"gradient add": 0}
    rows = [
        replace(row, bytes=free.get(row.kind, row.folded_bytes))
        if row.folded_bytes is not None
        else row
        for row in without_update(found.rows)
    ]
    assert rate(found, rows) == GIVEN(11_400, rel=0.015)
    assert 10_900 < limit(found, GPUS["H200"])["fused"] < 11_400


@pytest.mark.slow
@pytest.mark.parametrize("mode, gigabytes", [("fp32", 22.3), ("fp16_master", 11.5)])
def test_resnet50_memory(mode, gigabytes):
    assert counted("resnet50", mode).memory.total / 1e9 == GIVEN(gigabytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, reference, size", [("fp16_master", 135e3, 14), ("tf32", 69.1e3, 27)]
)
def test_alexnet(mode, reference, size):
    found = counted("alexnet", mode)
    assert found.parameters == 61_100_840  # torchvision's documentation
    assert gigaflops(found, "forward") == GIVEN(1.43, rel=0.004)  # 0.714 billion multiply-adds
    assert gigaflops(found) == GIVEN(4.15, rel=0.004)
    rows = without_update(found.rows, NOT_IN_REFERENCE)
    assert rate(found, rows) == GIVEN(reference, rel=0.015)
    # The reference reads and writes 9,216 values in the pooling that 224 px do not need, and again
    # in its backward pass.
    pooling = 4 * 9216 * (2 if mode == "fp16_master" else 4) / 1e6
    assert megabytes(found, rows) == GIVEN(size - pooling, rel=0.02)


@pytest.mark.slow
def test_alexnet_2012_by_hand_where_the_reference_counts_groups_twice():
    found = counted("alexnet_2012")
    assert found.parameters == 60_965_224
    places = (54**2, 27**2, 13**2, 13**2, 13**2)
    filters = (96 * 3 * 121, 256 * 48 * 25, 384 * 256 * 9, 384 * 192 * 9, 256 * 192 * 9)
    products = [p * f for p, f in zip(places, filters, strict=True)]
    linear = 9216 * 4096 + 4096**2 + 4096 * 1000
    forward = 2 * (sum(products) + linear) / 1e9
    assert gigaflops(found, "forward") == GIVEN(forward, rel=1e-9)
    stem = 2 * products[0] / 1e9
    assert gigaflops(found) == GIVEN(3 * forward - stem, rel=1e-9)
    # 4.96 in the reference, and by torch's formula, whose weight gradient of a convolution with
    # two groups has the FLOPs of both groups for each.
    twice = 2 * (products[1] + products[3] + products[4]) / 1e9
    with torch.device("meta"), FlopCounterMode(display=False) as torchs:
        AlexNet2012()(torch.empty(1, 3, 224, 224)).sum().backward()
    assert torchs.get_total_flops() / 1e9 == GIVEN(gigaflops(found) + twice, rel=1e-9)
    assert gigaflops(found) + twice == GIVEN(4.96, rel=0.005)


@pytest.mark.slow
def test_dcgan():
    found = counted("dcgan")
    assert found.parameters == 3_576_704 + 2_765_568
    assert gigaflops(found) == GIVEN(2.27, rel=0.005)
    # The reference makes D's weight gradients in the step of G as well: once more those of one of
    # the two passes, which are the first ten.
    weights = [row for row in found.rows if row.kind == "convolution weight gradient"]
    more = [*without_update(found.rows, ("cast",)), *weights[:5]]
    assert sum(row.flops for row in more) / found.samples / 1e9 == GIVEN(2.48, rel=0.005)
    assert megabytes(found, more) == GIVEN(16.4, rel=0.015)
    assert rate(found, more) == GIVEN(172e3, rel=0.015)


@pytest.mark.slow
def test_biglstm_counts_in_seconds_and_without_memory():
    found = counted("biglstm")
    # Shazeer et al., arXiv 1701.06538: 151.0 M in the LSTM layers; embedding 812.5 M, softmax
    # 813.3 M. torch has a second bias of 4 x 8192 numbers in each of the two layers.
    assert found.dense == 2 * (75_530_240 + 4 * 8192)
    assert found.parameters - found.dense == 2 * 793_472 * 1024 + 793_472
    # Two per weight, token and pass, and 8192 candidates.
    weights = found.dense - 2 * 8 * 8192
    assert gigaflops(found) == GIVEN(3 * 2 * (weights + 8192 * 1024) / 1e9, rel=1e-9)
    assert gigaflops(found) == GIVEN(0.956, rel=0.001)
    # The reference has the softmax in FP16, mprun computes it in FP32 in every mode. It was
    # counted by hand with a coarser rule for the gates: 4 %.
    rows = without_update(found.rows)
    in_half = [replace(row, form="fp16") if row.form else row for row in rows]
    assert rate(found, in_half) == GIVEN(620e3, rel=0.04)
    assert rate(found, rows) < 0.7 * 620e3


@pytest.mark.slow
def test_biglstm_with_the_full_softmax():
    found = count((*MODELS["biglstm"], "model.sampled_softmax=null"), "fp16_master")
    assert gigaflops(found) == GIVEN(5.78, rel=0.001)
    # Embedding and softmax are updated whole: momentum-free Adagrad reads gradient, weight and sum
    # in FP32 and writes two, 20 bytes; a cast of the FP16 gradient 6, and the FP16 copy 6.
    assert found.dense == found.parameters
