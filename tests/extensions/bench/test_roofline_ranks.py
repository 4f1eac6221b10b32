"""Ranks on paper: the figures of a reference table, and a made-up step by hand."""

import pytest

from mprun.extensions.bench.roofline.count import count
from mprun.extensions.bench.roofline.limits import GPUS, limits
from mprun.extensions.bench.roofline.operations import OperationCosts
from mprun.extensions.bench.roofline.ranks import (
    LINKS,
    WIRES,
    Link,
    exposed_s,
    latency_s,
    link_of,
    nodes_of,
    on_ranks,
    ring_s,
    transfer_s,
)

from .roofline_rows import TOY, made_up

# Nodes of 2 GPUs; 100 bytes/s within one, 10 between them, half a second a hop.
SLOW = Link("slow", "made up", 2, 100.0, 10.0, 0.5)


def test_a_ring_sends_each_part_twice():
    # 4 ranks, 100 bytes in parts of 25: 3 parts on the way to their sums, 3 on the way back.
    assert ring_s(100, 4, 10) == 6 * 25 / 10
    assert ring_s(100, 1, 10) == 0


# Parameters, then milliseconds on 8, 64 and 1,024 GPUs with NVLink and on 8 machines with 25 GbE.
# ResNet-50 by hand, S = 102.2 MB in FP32: 2 * 7/8 * 102.2 / 400 = 0.447 within a node; an eighth,
# 12.8 MB, between 8 nodes 2 * 7/8 * 12.8 / 45 = 0.497, between 128 nodes 2 * 127/128 * 12.8 / 45
# = 0.564; over 25 GbE 2 * 7/8 * 102.2 / 2.9 = 61.7.
# The reference has 148 for AlexNet over 25 GbE: 147.5 here.
REFERENCE = [
    (25_557_032, "fp32", (0.45, 0.94, 1.01), 62),
    (25_557_032, "fp16", (0.22, 0.47, 0.51), 31),
    (61_100_840, "fp32", (1.1, 2.3, 2.4), 147),
    (61_100_840, "fp16", (0.5, 1.1, 1.2), 74),
    (151_126_016, "fp32", (2.6, 5.6, 6.0), 365),  # bigLSTM without its tables
    (151_126_016, "fp16", (1.3, 2.8, 3.0), 182),
]


@pytest.mark.parametrize("parameters, wire, nvlink, ethernet", REFERENCE)
def test_the_reference_table(parameters, wire, nvlink, ethernet):
    size = WIRES[wire] * parameters
    digits = 2 if parameters < 30e6 else 1
    found = [1e3 * transfer_s(size, ranks, LINKS["nvlink"]) for ranks in (8, 64, 1024)]
    assert tuple(round(ms, digits) for ms in found) == nvlink
    assert round(1e3 * transfer_s(size, 8, LINKS["25gbe"])) == ethernet


def test_latency_of_trees_and_rings_between_nodes():
    tree, ring = latency_s(1024, LINKS["nvlink"])
    # The reference's 5 buckets: 0.6 and 10 ms. 128 nodes: 7 hops up and 7 down, 127 around twice.
    assert 5 * tree == pytest.approx(5 * 14 * 8e-6) == pytest.approx(0.56e-3)
    assert 5 * ring == pytest.approx(5 * 254 * 8e-6) == pytest.approx(10.16e-3)
    assert latency_s(8, LINKS["nvlink"]) == (0, 0)
    # Five in a row of links of 8 us: a tree is 3 deep.
    assert latency_s(5, link_of("12.5")) == (6 * 8e-6, 8 * 8e-6)


@pytest.mark.parametrize(
    "summing, backward, buckets, exposed",
    [
        (4, 8, 4, 1),  # the last bucket
        (8, 8, 4, 2),
        (12, 8, 4, 6),  # from 2, when the first bucket is ready, to 14
        (4, 8, 1, 4),
        (0, 8, 4, 0),
    ],
)
def test_what_a_backward_pass_does_not_hide(summing, backward, buckets, exposed):
    assert exposed_s(summing, backward, buckets) == exposed


def step(**more):
    rows = (
        OperationCosts("product", "forward", "fp16", 400, 100),  # 4 s
        OperationCosts("product", "backward", "fp16", 400, 100),  # 4 s
        OperationCosts("update", "update", "", 0, 100),  # 2 s
    )
    return made_up(*rows, parameters=250, bucket_bytes=250, **more)


def rows_of(counted, ranks, link=SLOW):
    found = on_ranks([counted], limits([counted], TOY, []), ranks, link)["modes"]["toy"]
    return found, found["rows"]


def test_a_step_by_hand():
    mode, (fp32, fp16) = rows_of(step(), [4])
    assert (mode["step_s"], mode["backward_s"], mode["wire"]) == (10, 4, "fp32")
    # 1,000 bytes: 1,000 / 100 in a node of 2, 500 / 10 between 2 nodes; 4 buckets, 2 hops each.
    assert (fp32["bytes"], fp32["nodes"], fp32["buckets"]) == (1000, 2, 4)
    assert (fp32["transfer_s"], fp32["tree_s"], fp32["ring_s"]) == (60, 4, 4)
    # The first bucket is ready after 1 s of 4.
    assert (fp32["hidden_s"], fp32["exposed_s"]) == (3, 61)
    assert (fp32["efficiency"], fp32["flat"]) == (10 / 71, 10 / 74)
    assert fp32["samples_per_s"] == 4 * 8 / 71
    # As many buckets, half as long.
    assert (fp16["transfer_s"], fp16["tree_s"], fp16["exposed_s"]) == (30, 4, 31)


def test_only_the_last_micro_batch_hides_and_one_rank_loses_nothing():
    mode, (one, _, four, _) = rows_of(step(micro_batches=2), [1, 4])
    assert mode["backward_s"] == 2
    assert four["exposed_s"] == 64 - 1.5
    assert one["exposed_s"] == one["tree_s"] == 0
    assert (one["efficiency"], one["samples_per_s"]) == (1, 0.8)


def test_nodes_are_full():
    assert nodes_of(4, LINKS["nvlink"]) == (1, 4)
    assert nodes_of(16, LINKS["nvlink"]) == (2, 8)
    assert nodes_of(12, LINKS["25gbe"]) == (12, 1)


@pytest.mark.slow
def test_resnet50_on_1024():
    """By hand from the counted step, 31.8 ms: the reference takes 2/3 of it, 21 ms, as backward;
    counted are 61 %. It has 5 buckets, 25 MiB are 4 of 102.2 MB."""
    images = ("data=synthetic_images", "data.image_size=224", "data.num_classes=1000")
    found = count(("model=resnet50", "optim=sgd", *images, "data.batch_size=256"), "amp")
    modes = on_ranks([found], limits([found], GPUS["H200"], []), [1024], LINKS["nvlink"])["modes"]
    mode = modes["amp"]
    fp32, fp16 = mode["rows"]
    assert (mode["step_s"], mode["backward_s"]) == pytest.approx((31.8e-3, 19.5e-3), rel=0.01)
    assert (fp32["buckets"], fp16["buckets"]) == (4, 4)
    assert fp32["tree_s"] == pytest.approx(4 * 14 * 8e-6)
    assert fp32["exposed_s"] == pytest.approx((1.0107e-3 + 0.448e-3) / 4, rel=1e-3)
    assert fp32["efficiency"] == pytest.approx(31.8 / (31.8 + 0.365), rel=1e-3)
