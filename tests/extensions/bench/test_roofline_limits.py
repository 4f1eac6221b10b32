"""From rows to limits, by hand; memory of a small network, by hand."""

import pytest
import torch
from torch import nn

from mprun.extensions.bench.roofline.count import count
from mprun.extensions.bench.roofline.limits import GPUS, RECIPES, ceilings_of, limit, why_not
from mprun.extensions.bench.roofline.operations import OperationCosts
from mprun.extensions.bench.roofline.shape_only import SavedTensors, weightless
from mprun.precision import get_policy

from .roofline_rows import TOY, made_up


def test_each_row_takes_the_longer_of_products_and_traffic():
    rows = (
        # 4 s of products, 2 s of traffic
        OperationCosts("product", "forward", "fp16", 400, 100, least_bytes=100),
        # 1 s and 2 s, of which 1.5 s are left
        OperationCosts("product", "backward", "fp32", 10, 100, least_bytes=75),
        OperationCosts("relu", "forward", "", 0, 50, launches=3, folded_bytes=0),  # 1 s, folded 0
        OperationCosts("add", "forward", "", 0, 100, folded_bytes=50),  # 2 s, folded 1
        OperationCosts("update", "update", "", 0, 50, least_bytes=50),  # 1 s
    )
    found = limit(made_up(*rows), TOY)
    assert found["step_s"] == 10
    assert found["eager"] == 8 / 10
    assert found["fused"] == 8 / (4 + 2 + 0 + 1 + 1)
    assert found["limit"] == 8 / (4 + 1.5 + 0 + 0 + 1)
    assert found["flop_only"] == 8 / 5
    assert found["without_update"] == 8 / 9
    assert found["update_s"] == 1
    assert found["memory_bound_share"] == 0.6
    assert found["launches"] == 7
    assert (found["graph_launches"], found["eager_launches"]) == (8 / 3.5, 8 / 14)
    assert limit(made_up(OperationCosts("product", "forward", "fp16", 1, 1)), TOY)["fused"] is None
    first = found["kinds"][0]
    assert (first["kind"], first["phase"]) == ("product", "forward")
    assert (first["seconds"], first["share"]) == (4, 0.4)


@pytest.mark.parametrize(
    "mode, overrides, missing",
    [
        ("tf32", [], "TF32"),
        ("bf16_master", [], "BF16"),
        ("amp_bf16", [], "BF16"),
        ("fp16_master", ["bf16"], "BF16"),
        ("fp16_master", ["fp32"], None),
        ("fp32", [], None),
    ],
)
def test_what_a_v100_lacks(mode, overrides, missing):
    reason = why_not(get_policy(mode), overrides, GPUS["V100"])
    assert (reason is None) if missing is None else (f"no {missing} products" in reason)
    assert why_not(get_policy(mode), overrides, GPUS["A100"]) is None


def test_saved_tensors_count_once_and_while_they_are_held():
    with weightless():
        layers = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
        x = torch.empty(3, 10)
        saved = SavedTensors(layers.parameters())
        with saved.watching():
            for _ in range(2):  # what the first pass kept is gone when the second begins
                layers(x).sum().backward()
    # Input and output of the ReLU; weights are no part of it.
    assert saved.peak == 4 * (3 * 10 + 3 * 20)


SMALL = ("optim=sgd_alexnet", "data=synthetic_images", "data.batch_size=2")
ALEXNET = ("model=alexnet", "data.image_size=64", *SMALL)
PUBLISHED = ("model=alexnet_2012", "data.image_size=224", "data.num_classes=1000", *SMALL)


@pytest.mark.slow
def test_accumulation_keeps_one_micro_batch_at_a_time():
    one, three = count(ALEXNET, "fp32"), count((*ALEXNET, "train.accumulate=3"), "fp32")
    assert three.samples == 3 * one.samples
    assert three.memory == one.memory
    forward = [sum(r.flops for r in c.rows if r.phase == "forward") for c in (one, three)]
    assert forward[1] == 3 * forward[0]


@pytest.mark.slow
def test_memory_of_masters_and_state():
    found = count(PUBLISHED, "fp16_master_scaled")
    weights = found.parameters
    assert found.memory.parameters == found.memory.optimizer == 4 * weights
    assert found.memory.copies == 2 * weights and found.memory.gradients == 4 * weights


def test_names_in_any_case():
    assert [ceilings_of(name).name for name in ("h200", "A100")] == ["H200", "A100"]


# Bytes of a weight by SGD with momentum. Weight and momentum read and written, the gradient read.
FUSED = 4 + 8 + 8
CHECK = UNSCALE = 4 + 4
WIDEN, CAST = 2 + 4, 4 + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "recipe", "passes"),
    [
        ("fp32", "fp32", {"update": FUSED}),
        ("fp16_master", "fp16 with masters", {"update": FUSED, "cast": WIDEN + CAST}),
        (
            "fp16_master_scaled",
            "fp16 with masters and loss scale",
            {"update": FUSED, "cast": WIDEN + CAST, "mul": UNSCALE, "unscale and check": CHECK},
        ),
    ],
)
def test_recipes_are_what_a_step_moves(mode, recipe, passes):
    """Large layers are used, whose weights hide other casts; the write of each gradient counts."""
    found = count(PUBLISHED, mode)
    for kind, size in passes.items():
        named = (row.bytes for row in found.rows if row.kind == kind)
        rows = [size for size in named if size > 7 * 10**6]
        assert sum(rows) / found.dense == pytest.approx(size, rel=0.05), kind
    written = 4 if mode == "fp32" else 2
    assert RECIPES[recipe] == sum(passes.values()) + written


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp32", "amp", "fp16_master_scaled"])
def test_flops_and_memory_of_a_real_step(mode, build_run):
    from torch.utils.flop_counter import FlopCounterMode

    overrides = ("model=resnet50", "optim=sgd", "data=synthetic_images", "data.image_size=64")
    overrides = (*overrides, "data.batch_size=64", f"precision={mode}", "train.cuda_graph=off")
    built = build_run(*overrides, device="cuda")
    built.task.compute(built.task.load(0))
    with FlopCounterMode(display=False) as torchs:
        built.task.compute(built.task.load(1))
    found = count(overrides)
    assert found.flops == torchs.get_total_flops()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    built.task.compute(built.task.load(2))
    peak = torch.cuda.max_memory_allocated()
    # At the end of the forward pass there are no gradients yet. cuDNN's workspaces come on top.
    assert 0.98 * (found.memory.total - found.memory.gradients) < peak
    assert peak < 2 * found.memory.total + 2**30
