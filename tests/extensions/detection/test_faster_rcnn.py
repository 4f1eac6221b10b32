"""Faster R-CNN against torchvision's classes, and what is our own by hand."""

import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.models import vgg16
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import nms, roi_align, roi_pool

from mprun.extensions.bench.roofline.count import count
from mprun.extensions.detection import faster_rcnn
from mprun.extensions.detection.boxes import by_box, unsuppressed
from mprun.extensions.detection.canvases import digit_canvases
from mprun.extensions.detection.faster_rcnn import RegionPool, anchors, drawn

from ...execution.trained import SMALL
from ...helpers import configured
from ...shipped import MODES

SIDE, ALL = 32, 10_000
DIGITS = {"num_classes": 10, "image_size": SIDE}
VGG = {"variant": "vgg16", "num_classes": 20, "image_size": 600}


@pytest.fixture
def network():
    """The small one, which learns from all anchors and from all regions."""
    made = configured("faster_rcnn", **DIGITS)
    made.proposals.count = made.regions.count = ALL
    # All anchors are looked at: torchvision forgets small regions after the first ones are taken.
    made.limits = made.limits._replace(before=576, before_in_evaluation=576)
    with torch.no_grad():  # so that proposals and detections are something to compare
        for layer in (made.shared[0], made.objectness, made.shifts, made.classes, made.offsets):
            layer.weight *= 5
        made.classes.weight *= 20
    return made


@pytest.fixture
def batch():
    (images, targets), _ = digit_canvases()
    return images[:4].float().expand(-1, 3, -1, -1) / 50 - 1, targets[:4]


class Made(nn.Module):
    """A module of a function."""

    def __init__(self, forward):
        super().__init__()
        self.forward = forward


def torchvision_s_proposals(network, scores, offsets, chosen, targets):
    """Regions and losses of torchvision's class for these anchors of each image."""
    own = network.proposals.anchors[chosen] * SIDE
    odds = scores[:, chosen, 1] - scores[:, chosen, 0]
    outputs = [odds[:, None, :, None]], [offsets[:, chosen].transpose(1, 2)[..., None]]
    before, after = ({"training": n, "testing": n} for n in network.limits[2:4])
    network_of_theirs = RegionProposalNetwork(
        Made(lambda *_: [own] * len(scores)), Made(lambda _: outputs),
        0.7, 0.3, ALL, 0.5, before, after, 0.7,
    )  # fmt: skip
    network_of_theirs.min_size = network.limits.least_side
    images = ImageList(scores.new_zeros(len(scores), 3, SIDE, SIDE), [(SIDE, SIDE)] * len(scores))
    return network_of_theirs(images, {"0": scores}, targets)


def as_theirs(targets):
    return [
        {"boxes": own[own[:, 4] >= 0, :4] * SIDE, "labels": own[own[:, 4] >= 0, 4].long() + 1}
        for own in targets
    ]


def outputs(network, images):
    maps = network.features(images)
    shared = network.shared(maps)
    return maps, by_box(network.objectness(shared), 2), by_box(network.shifts(shared), 4)


def test_losses_are_torchvision_s(network, batch, monkeypatch):
    monkeypatch.setattr(faster_rcnn, "REGION_BETA", 1 / 9)  # as there; py-faster-rcnn has 1
    images, targets = batch
    maps, scores, offsets = outputs(network, images)
    own = network.proposals(scores, offsets, targets)
    box = network.proposals.anchors
    inside = ((box >= 0) & (box <= 1)).all(1).nonzero().squeeze(1)
    _, losses = torchvision_s_proposals(network, scores, offsets, inside, as_theirs(targets))
    # The order of sums differs.
    torch.testing.assert_close(own, sum(losses.values()), rtol=1e-5, atol=0)

    found = network.proposals.propose(scores, offsets, *network.limits[2:4])
    examples = network.regions.examples(*found, targets)
    regions = network.regions(*network.inside(maps, examples[0]), *examples[1:])
    heads = theirs(network)
    proposed = [boxes[valid] * SIDE for boxes, valid in zip(*found, strict=True)]
    sizes = [(SIDE, SIDE)] * len(images)
    _, losses = heads({"0": maps}, proposed, sizes, as_theirs(targets))
    torch.testing.assert_close(regions, sum(losses.values()), rtol=1e-5, atol=0)
    whole = network(images, targets)
    torch.testing.assert_close(whole.loss, own + regions, rtol=1e-6, atol=0)
    assert whole.detections is None


def test_regions_are_pooled_as_by_torchvision():
    """Small integers: maxima tie, and sums of gradients are exact in any order."""
    draw = torch.Generator().manual_seed(0)
    maps = torch.randint(-9, 9, (2, 3, 8, 8), generator=draw).float()
    corners = torch.randint(-4, 36, (14, 2), generator=draw).float()
    image = torch.tensor([0.0, 1.0]).repeat_interleave(7)[:, None]
    places = torch.cat([image, corners, corners + torch.arange(14)[:, None]], 1)
    places[3, 1:] = 99  # outside: nothing to find
    own, other = maps.clone().requires_grad_(), maps.clone().requires_grad_()
    pooled = faster_rcnn.roi_pool(own, places, 4, 0.25)
    expected = roi_pool(other, places, 4, 0.25)
    assert torch.equal(pooled, expected) and (pooled[3] == 0).all()
    gradient = torch.randint(-9, 9, pooled.shape, generator=draw).float()
    pooled.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(own.grad, other.grad) and own.grad.any()


def test_proposals_and_detections_are_torchvision_s(network, batch, monkeypatch):
    # Two regions that round to the same one have the same score, and either may be the first.
    monkeypatch.setattr(faster_rcnn, "roi_pool", roi_align)
    images, targets = batch
    maps, scores, offsets = outputs(network, images)
    limits = network.limits
    found = network.proposals.propose(scores, offsets, *limits[2:4])
    every = torch.arange(len(network.proposals.anchors))
    boxes, _ = torchvision_s_proposals(network, scores, offsets, every, as_theirs(targets))
    for own, valid, other in zip(*found, boxes, strict=True):
        assert valid.sum() > 5
        torch.testing.assert_close(own[valid] * SIDE, other, rtol=0, atol=SIDE * 1e-6)

    network.eval()
    loss, detections = network(images, targets)
    assert loss.dtype == torch.float32
    regions, valid = network.proposals.propose(scores, offsets, *limits[4:6])
    proposed = [boxes[valid] * SIDE for boxes, valid in zip(regions, valid, strict=True)]
    heads, sizes = theirs(network, roi_align).eval(), [(SIDE, SIDE)] * len(images)
    results, _ = heads({"0": maps}, proposed, sizes)
    for own, other in zip(detections, results, strict=True):
        own = own[own[:, 4] >= 0]
        assert 2 < len(own) == len(other["scores"])
        torch.testing.assert_close(own[:, 5], other["scores"], rtol=1e-5, atol=0)
        torch.testing.assert_close(own[:, :4] * SIDE, other["boxes"], rtol=0, atol=SIDE * 1e-5)
        assert (own[:, 4] + 1).tolist() == other["labels"].tolist()


def theirs(network, pool=roi_pool):
    """torchvision's second network, on the layers of ours."""
    pooled = Made(lambda maps, boxes, sizes: pool(maps["0"], boxes, 4, 0.25))
    predictor = Made(lambda found: (network.classes(found), network.offsets(found)))
    return RoIHeads(
        pooled, network.head, predictor, 0.5, 0.5, ALL, 0.25, None, 0.05, 0.3, 100
    )  # fmt: skip


def test_anchors_are_those_of_py_faster_rcnn():
    # As its generate_anchors.py prints them: pixels from 1, both ends inside; in our order.
    corners = torch.tensor(
        [
            (-83, -39, 100, 56), (-175, -87, 192, 104), (-359, -183, 376, 200),
            (-55, -55, 72, 72), (-119, -119, 136, 136), (-247, -247, 264, 264),
            (-35, -79, 52, 96), (-79, -167, 96, 184), (-167, -343, 184, 360),
        ]
    )  # fmt: skip
    corners[:, :2] -= 1
    own = anchors(32, 16, (8, 16, 32)) * 32
    torch.testing.assert_close(own[:9], corners.float())
    torch.testing.assert_close(own[9:18], corners + torch.tensor([16.0, 0, 16, 0]))


def test_what_an_anchor_is_an_example_of():
    boxes = [
        [0.0, 0.0, 0.4, 0.4],  # the first object itself
        [0.0, 0.0, 0.4, 0.3],  # 3/4 of it
        [0.0, 0.0, 0.4, 0.2],  # a half: neither
        [0.0, 0.0, 0.2, 0.2],  # a quarter: of nothing
        [0.5, 0.5, 0.7, 1.0],  # 2/5 of the second, which none overlaps more
        [0.5, 0.5, 1.0, 1.1],  # across the border, although it overlaps it by 5/6
        [0.0, 0.5, 0.4, 0.9],  # a difficult one
    ]
    objects = [[0.0, 0.0, 0.4, 0.4, 3, 0], [0.5, 0.5, 1.0, 1.0, 4, 0]]
    objects += [[0.0, 0.5, 0.4, 0.9, 5, 1], [0.0, 0.0, 0.0, 0.0, -1, 0]]
    proposals = faster_rcnn.Proposals(torch.tensor(boxes), 7, 0.0)
    positive, negative, chosen = proposals.match(torch.tensor([objects]))
    assert positive[0].tolist() == [True, True, False, False, True, False, False]
    assert negative[0].tolist() == [False, False, False, True, False, False, True]
    assert chosen[0, [0, 1, 4]].tolist() == [0, 0, 1]


def test_an_image_without_objects_has_a_loss(network, batch):
    images, targets = batch
    nothing = torch.zeros_like(targets)
    nothing[..., 4] = -1
    found = network(images, nothing)
    found.loss.backward()
    assert 0 < found.loss < 20
    assert not network.shifts.weight.grad.any() and network.objectness.weight.grad.any()


def test_what_is_drawn():
    positive = torch.zeros(2, 1000, dtype=torch.bool)
    positive[0, :40] = positive[1, :3] = True
    negative = ~positive
    negative[:, 900:] = False
    seen = torch.zeros(2, 1000)
    for _ in range(400):
        places, there = drawn(positive, negative, 64, 16, True)
        assert there.all() and positive.gather(1, places).sum(1).tolist() == [16, 3]
        assert not (places >= 900).any() and (places.sort().values.diff() > 0).all()
        seen.scatter_add_(1, places, torch.ones(2, 64))
    # 16 of 40, 48 of 860: binomial around 160 and 22.3, within five deviations.
    assert (seen[0, :40] - 160).abs().max() < 5 * 9.8
    assert (seen[0, 40:900] - 400 * 48 / 860).abs().max() < 5 * 4.6
    # Fewer than are asked for.
    _, there = drawn(positive, torch.zeros_like(negative), 64, 16, True)
    assert there.sum(1).tolist() == [16, 3]


def test_evaluation_draws_nothing_and_repeats(batch):
    images, targets = batch
    network = configured("faster_rcnn", **DIGITS).eval()
    before = torch.get_rng_state()
    first, second = network(images, targets), network(images, targets)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.loss, second.loss)
    network.train()
    assert network(images, targets).loss != network(images, targets).loss  # other samples


def test_what_suppression_leaves():
    corners, sides = torch.rand(3, 50, 2), 0.1 + torch.rand(3, 50, 2) / 2
    boxes, scores = torch.cat([corners, corners + sides], 2), torch.randn(3, 50)
    scores[1, 7:] = -torch.inf
    scores[2] = -torch.inf
    found = unsuppressed(boxes, scores, 0.3, 20)
    for row, own, score in zip(found[:2], boxes, scores, strict=False):
        kept = [place for place in nms(own, score, 0.3).tolist() if score[place] > -torch.inf][:20]
        assert row.tolist() == kept + [-1] * (20 - len(kept))
    assert (found[2] == -1).all()
    with FakeTensorMode() as mode:  # as tensors without values have it
        shape = unsuppressed(mode.from_tensor(boxes), mode.from_tensor(scores), 0.3, 20)
    assert (shape.shape, shape.dtype) == (found.shape, found.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pooling_adds_up_gradients_in_fp32(dtype):
    maps = torch.arange(16.0, dtype=dtype).view(1, 1, 4, 4).requires_grad_()
    regions = torch.tensor([[[0.0, 0.0, 0.5, 0.5]]]).expand(1, 3000, 4)
    pooled = RegionPool(1, 4)(maps, regions)
    assert pooled.shape == (3000, 1, 1, 1) and pooled.dtype == dtype
    # Positions 0 to 2 of each axis: both ends are inside, as in py-faster-rcnn.
    assert (pooled == 10).all()
    pooled.backward(torch.ones_like(pooled))
    # In 16 bits ones add up to 2048 or 256.
    assert maps.grad[0, 0, 2, 2] == torch.tensor(3000.0).to(dtype)


def test_a_diverged_network_says_so(network, batch):
    with torch.no_grad():
        network.shifts.bias.fill_(torch.nan)
    loss, _ = network(*batch)
    assert loss.isnan()
    network.eval()
    loss, detections = network(*batch)
    assert loss.isnan() and detections.shape[2] == 6


def test_first_convolutions_keep_their_weights(batch):
    network = configured("faster_rcnn", **DIGITS, frozen=2)
    network(*batch).loss.backward()
    learns = [p.grad is not None for p in network.features.parameters()]
    assert learns == [False] * 4 + [True] * 4


EVERY = [pytest.param(m, marks=[pytest.mark.slow] * (m != "fp16_naive")) for m in MODES]
IN_FP32 = {"unsuppressed", "roi_pool", "encode", "decode", "overlaps", "_mean"}


@pytest.mark.parametrize("mode", [own for own in EVERY if own.values != ("tf32",)])
def test_boxes_and_losses_are_fp32_in_every_mode(build_run, mode, monkeypatch):
    seen = {name: set() for name in IN_FP32}

    def spied(name):
        function = getattr(faster_rcnn, name)

        def call(*arguments, **named):
            seen[name].update(t.dtype for t in arguments if isinstance(t, torch.Tensor))
            return function(*arguments, **named)

        monkeypatch.setattr(faster_rcnn, name, call)

    for name in IN_FP32:
        spied(name)
    built = build_run(*SMALL["two_stages"], f"precision={mode}", "train.eval_arithmetic=mode")
    assert built.task.evaluate()["loss"] > 0
    loss = built.task.train_step(0)["loss"]
    assert loss.dtype == torch.float32 and loss.isfinite()
    assert all(dtypes and dtypes <= {torch.float32, torch.bool} for dtypes in seen.values())


def vgg(path, **changed):
    """A file as torchvision's of a VGG-16, of a few bytes: all numbers of a tensor are one."""
    with torch.device("meta"):
        names = vgg16().state_dict()
    state = {
        n: torch.full((1,), float(i)).expand(t.shape) for i, (n, t) in enumerate(names.items())
    }
    torch.save({n: t for n, t in (state | changed).items() if t is not None}, path)
    return list(names)


def test_weights_of_a_vgg(tmp_path, monkeypatch):
    path = str(tmp_path / "vgg16.pth")
    names = vgg(path)
    found = {}
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda _, own, strict: found.update(own))
    with torch.device("meta"):
        network = configured("faster_rcnn", **VGG, weights=path)
    numbers = {name: int(tensor.flatten()[0]) for name, tensor in found.items()}
    theirs = {"head.1": "classifier.0", "head.4": "classifier.3"}
    for name, number in numbers.items():
        layer, _, kind = name.rpartition(".")
        assert names[number] == f"{theirs.get(layer, layer)}.{kind}"
    assert len(numbers) == 2 * (13 + 2)
    own = network.state_dict()
    assert all(own[name].shape == tensor.shape for name, tensor in found.items())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"features.28.bias": None}, "nor a VGG-16, because features.28.bias is missing"),
        ({"classifier.3.bias": torch.zeros(3)}, "head.4.bias is [3], must be [4096]"),
    ],
)
def test_other_weights_are_refused(tmp_path, changed, said):
    path = str(tmp_path / "other.pth")
    vgg(path, **changed)
    with torch.device("meta"), pytest.raises(ValueError, match=re.escape(said)):
        configured("faster_rcnn", **VGG, weights=path)


@pytest.mark.slow
def test_the_roofline_counts_the_published_recipe():
    convolutions = {  # side of the map, weights of 3x3 kernels
        "conv1": 600**2 * 9 * (3 * 64 + 64**2),
        "conv2": 300**2 * 9 * (64 * 128 + 128**2),
        "conv3": 150**2 * 9 * (128 * 256 + 2 * 256**2),
        "conv4": 75**2 * 9 * (256 * 512 + 2 * 512**2),
        "conv5": 37**2 * 9 * 3 * 512**2,
        "proposals": 37**2 * 512 * (9 * 512 + 9 * 6),
    }
    regions = 128 * 4096 * (512 * 7 * 7 + 4096 + 21 * 5)
    frozen = convolutions["conv1"] + convolutions["conv2"]
    learned = sum(convolutions.values()) - frozen + regions
    # Of what learns two more products, but nothing goes on to conv2 from conv3_1.
    products = frozen + 3 * learned - 150**2 * 9 * 128 * 256
    counted = count(["experiment=faster_rcnn_voc"], "fp32")
    assert counted.parameters == 137_078_239
    assert counted.flops == 2 * 2 * products  # two images, two FLOP
