"""Single-shot detectors: boxes, matching and losses by hand, SSD300 beside torchvision's."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mprun import prepare
from mprun.extensions.detection.boxes import decode, encode, overlaps
from mprun.extensions.detection.ssd import L2Norm, MultiBox
from mprun.precision import get_policy

from ...helpers import configured

NONE = [0.0, 0, 0, 0, -1, 0]
VOC, DIGITS = {"num_classes": 20}, {"num_classes": 10, "image_size": 32}


def test_overlap_by_hand():
    one = torch.tensor([[0.0, 0, 2, 2], [0, 0, 0, 0]])
    other = torch.tensor([[1.0, 1, 3, 3], [0, 0, 2, 1], [5, 5, 6, 6]])
    expected = torch.tensor([[1 / 7, 1 / 2, 0], [0, 0, 0]])
    torch.testing.assert_close(overlaps(one, other), expected)


def test_offsets_by_hand_and_back():
    reference, box = torch.tensor([0.0, 0, 0.5, 0.5]), torch.tensor([0.25, 0, 0.5, 1.0])
    # Centre 0.125 right and 0.25 down of sides 0.5; half as wide, twice as high.
    expected = torch.tensor([2.5, 5.0, -5 * math.log(2), 5 * math.log(2)])
    torch.testing.assert_close(encode(box, reference, (10, 5)), expected)
    torch.testing.assert_close(decode(expected, reference, (10, 5)), box)


@pytest.mark.parametrize("mode", ["fp16_master", "fp16_naive", "amp"])
def test_a_norm_above_the_largest_half_is_no_silent_zero(mode):
    network = nn.Sequential(nn.Conv2d(512, 512, 1, groups=512), L2Norm(512, 20.0))
    nn.init.ones_(network[0].weight)
    nn.init.zeros_(network[0].bias)
    seen = []

    def see(module, inputs, outputs):
        seen.append((module.weight.dtype, inputs[0].dtype, outputs.dtype))

    see.sees_inside = True
    network[1].register_forward_hook(see)
    prepare(network, precision=mode)
    maps = torch.full((1, 512, 2, 2), 3000.0)
    found, half = network(maps), get_policy(mode).half_dtype
    assert seen == [(torch.float32, half, half)]
    torch.testing.assert_close(found, torch.full_like(maps, 20 / 512**0.5), rtol=2**-11, atol=0)
    assert (F.normalize(maps.to(half)) == 0).all()  # what it is there for


DEFAULTS = torch.tensor(
    [[0.0, 0, 0.5, 0.5], [0.5, 0, 1, 0.5], [0, 0.5, 0.5, 1], [0.4, 0.5, 0.9, 1], [0.5, 0.5, 1, 1]]
)


def test_matching_by_hand():
    near = [0.0, 0, 0.5, 0.4, 3, 0]  # overlaps default 0 by 0.8
    small = [0.5, 0.5, 0.6, 0.6, 7, 0]  # 0.04 of defaults 3 and 4: of the first of the best
    hard = [0.5, 0, 1, 0.5, 5, 1]
    own, matched = MultiBox(DEFAULTS, mean=True).match(torch.tensor([[near, small, hard, NONE]]))
    assert matched.tolist() == [[True, False, False, True, False]]
    assert own[0, 0].tolist() == pytest.approx(near) and own[0, 3].tolist() == pytest.approx(small)


def test_an_object_keeps_its_best_box_against_one_that_overlaps_it_more():
    whole, inner = [0.0, 0, 0.5, 0.5, 1, 0], [0.0, 0.0, 0.5, 0.3, 2, 0]
    own, matched = MultiBox(DEFAULTS[:1], mean=True).match(torch.tensor([[inner, whole]]))
    assert matched.all() and own[0, 0, 4] == 1  # both have it as the best: the nearer one
    none, matched = MultiBox(DEFAULTS, mean=False).match(torch.tensor([[NONE, NONE]]))
    assert not matched.any() and torch.isfinite(none).all()


def test_objects_that_share_their_best_box_have_one_each():
    """The pair that overlaps most first, then the next among what is left, as in Caffe."""
    other, best = [0.5, 0.5, 0.7, 0.7, 7, 0], [0.5, 0.5, 0.8, 0.8, 3, 0]  # 0.16, 0.36 of 3 and 4
    left = [0.0, 0.5, 0.3, 0.7, 1, 0]  # 0.24 of default 2
    targets = torch.tensor([[other, best, left, NONE], [NONE, NONE, best, other]])
    own, matched = MultiBox(DEFAULTS, mean=True).match(targets)
    assert matched.tolist() == [[False, False, True, True, True], [False, False, False, True, True]]
    assert own[0, 2:, 4].tolist() == [1, 3, 7] and own[1, 3:, 4].tolist() == [3, 7]
    nowhere = [2.0, 2, 3, 3, 4, 0]  # overlaps no box
    assert not MultiBox(DEFAULTS, mean=True).match(torch.tensor([[nowhere]]))[1].any()


def losses(mean, offsets, logits, targets):
    """The definition, one default box after the other, in Python's numbers."""
    total, matched, terms = 0.0, 0, []
    for i, image in enumerate(targets):
        objects = [t for t in image.tolist() if t[4] >= 0 and not t[5]]
        chosen = {}
        for k, t in enumerate(objects):
            row = overlaps(torch.tensor([t[:4]]), DEFAULTS)[0].tolist()
            for d, value in enumerate(row):
                value += 2 * (row.index(max(row)) == d)  # no two objects share their best here
                if value >= 0.5 and value > chosen.get(d, (0, 0))[0]:
                    chosen[d] = (value, k)
        hard, boxes = [], 0.0
        for d in range(len(DEFAULTS)):
            name = int(objects[chosen[d][1]][4]) + 1 if d in chosen else 0
            z = logits[i, d].double()
            if mean:
                p = z.sigmoid()
                terms += [-(p[c] if c == name else 1 - p[c]).log().item() for c in range(len(z))]
            else:
                error = -z.log_softmax(0)[name].item()
                if d in chosen:
                    total += error
                else:
                    hard.append(error)
            if d in chosen:
                box = torch.tensor(objects[chosen[d][1]][:4])
                wanted = encode(box, DEFAULTS[d], (10, 5))
                for a, b in zip(offsets[i, d].tolist(), wanted.tolist(), strict=True):
                    boxes += (a - b) ** 2 / 2 if abs(a - b) < 1 else abs(a - b) - 0.5
        total += boxes
        matched += len(chosen)
        total += sum(sorted(hard, reverse=True)[: 3 * len(chosen)])
    if mean:
        return (sum(terms) + total) / (3 * len(DEFAULTS))
    return total / max(1, matched)


@pytest.mark.parametrize("mean", [True, False])
def test_both_losses_as_by_definition(mean):
    generator = torch.Generator().manual_seed(3)
    near, small = [0.0, 0, 0.5, 0.4, 3, 0], [0.5, 0.5, 0.6, 0.6, 1, 0]
    targets = torch.tensor([[near, small, NONE], [small, NONE, NONE], [NONE, NONE, NONE]])
    offsets = torch.randn(3, 5, 4, generator=generator)
    logits = 3 * torch.randn(3, 5, 6, generator=generator)
    loss, detections = MultiBox(DEFAULTS, mean).train()(offsets, logits, targets)
    assert detections is None
    assert loss.item() == pytest.approx(losses(mean, offsets, logits, targets), rel=1e-5)
    loss, _ = MultiBox(DEFAULTS, mean)(offsets[2:], logits[2:], targets[2:])
    assert torch.isfinite(loss)  # of images without objects


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "fp16_master", "fp16_naive", "amp", "amp_bf16"])
def test_the_loss_is_in_fp32_in_every_mode(build_run, mode):
    built = build_run("model=ssd_mini", "data.batch_size=2", f"precision={mode}")
    [batch] = built.task.load(0)
    with built.forward_context:
        loss, _ = built.task.loss(batch)
    assert loss.dtype is built.task.learner.model.multibox.defaults.dtype is torch.float32


def test_detections_of_perfect_outputs_are_the_objects():
    multibox = MultiBox(DEFAULTS, mean=False).eval()
    box = torch.tensor([0.05, 0.0, 0.5, 0.45])
    offsets, logits = torch.zeros(1, 5, 4), torch.zeros(1, 5, 4)
    logits[..., 0] = 20.0
    offsets[0, 0], logits[0, 0, 3] = encode(box, DEFAULTS[0], (10, 5)), 40.0
    rows = multibox.detections(offsets, logits)[0]
    torch.testing.assert_close(rows[0], torch.tensor([*box.tolist(), 2.0, 1.0]))
    assert (rows[1:, 4] == -1).all() and rows.shape == (15, 6)


@pytest.mark.slow
def test_ssd300_computes_what_torchvision_s_does():
    from torchvision.models.detection import ssd300_vgg16
    from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
    from torchvision.models.detection.image_list import ImageList
    from torchvision.ops import box_iou

    network = configured("ssd300", **VOC).eval()
    other = ssd300_vgg16(weights=None, weights_backbone=None, num_classes=21).eval()

    def convolutions(*parts):
        return [m for part in parts for m in part.modules() if isinstance(m, nn.Conv2d)]

    own = convolutions(network.features, network.extras, network.offsets, network.classes)
    heads = other.head.regression_head, other.head.classification_head
    with torch.no_grad():
        for mine, theirs in zip(own, convolutions(other.backbone, *heads), strict=True):
            theirs.weight.copy_(mine.weight)
            theirs.bias.copy_(mine.bias)
        images = 60 * torch.randn(1, 3, 300, 300)
        maps = list(other.backbone(images).values())
        expected = other.head(maps)
        offsets, logits = network.outputs(images)
    for found, wanted in ((offsets, "bbox_regression"), (logits, "cls_logits")):
        scale = expected[wanted].abs().max().item()
        torch.testing.assert_close(found, expected[wanted], rtol=0, atol=1e-5 * scale)
    scales = [share / 300 for share in (30, 60, 111, 162, 213, 264, 315)]
    ratios = [[2], [2, 3], [2, 3], [2, 3], [2], [2]]
    generator = DefaultBoxGenerator(
        ratios, scales=scales, steps=[8, 16, 32, 64, 100, 300], clip=False
    )
    [boxes] = generator(ImageList(images, [(300, 300)]), maps)
    torch.testing.assert_close(network.multibox.defaults, boxes / 300, rtol=0, atol=1e-6)
    # Losses and detections of these outputs, smaller. No two objects have a best box in common.
    corners = [[0.05, 0.06, 0.4, 0.47], [0.53, 0.5, 0.95, 0.9], [0.61, 0.1, 0.8, 0.32]]
    objects = torch.tensor(corners)
    classes = torch.tensor([3, 0, 19])
    offsets, logits = offsets / offsets.abs().max() / 4, 8 * logits / logits.abs().max()
    head = {"bbox_regression": offsets, "cls_logits": logits}
    labelled = [{"boxes": objects * 300, "labels": classes + 1}]
    matches = other.proposal_matcher(box_iou(objects * 300, boxes))
    expected = sum(other.compute_loss(labelled, head, [boxes], [matches]).values())
    rest = torch.stack([classes.float(), torch.zeros(3)], 1)
    found = network.multibox.train()(offsets, logits, torch.cat([objects, rest], 1)[None]).loss
    torch.testing.assert_close(found, expected, rtol=2.0**-18, atol=0)
    [wanted] = other.postprocess_detections(head, [boxes], [(300, 300)])
    rows = network.multibox.eval().detections(offsets, logits)[0]
    rows = rows[rows[:, 4] >= 0]
    parts = wanted["boxes"] / 300, wanted["labels"][:, None] - 1.0, wanted["scores"][:, None]
    assert len(rows) == 200
    torch.testing.assert_close(rows, torch.cat(parts, 1), rtol=0, atol=2.0**-18)


@pytest.mark.slow
def test_weights_of_a_file(tmp_path):
    path = tmp_path / "w.pth"
    network = configured("ssd300", **VOC)
    torch.save(network.state_dict(), path)
    again = configured("ssd300", **VOC, weights=str(path))
    assert all(map(torch.equal, network.state_dict().values(), again.state_dict().values()))
    vgg = {k: v for k, v in network.state_dict().items() if k.startswith("features.")}
    vgg = {k: v for k, v in vgg.items() if int(k.split(".")[1]) < 29}
    more = {"classifier.0.weight": torch.zeros(2)}
    for names in (vgg | more, {k[9:]: v for k, v in vgg.items()}):
        torch.save(names, path)
        again = configured("ssd300", **VOC, weights=str(path)).state_dict()
        assert all(torch.equal(again[name], value) for name, value in vgg.items())
    for content, said in (
        ({"a": torch.zeros(1)}, "because features.0.weight is missing"),
        (vgg | {"features.5.weight": torch.zeros(3)}, "features.5.weight is .3., must be .128, 64"),
        ([1, 2], "must map names to tensors"),
        (nn.Linear(1, 1), "a file from torch.save that contains only weights"),
    ):
        torch.save(content, path)
        with pytest.raises(ValueError, match=f"weights={path}: .*{said}"):
            configured("ssd300", **VOC, weights=str(path))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="a file from torch.save that contains only weights"):
        configured("ssd300", **VOC, weights=str(path))
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        configured("ssd300", **VOC, weights=str(tmp_path / "none"))


def test_a_frozen_backbone_does_not_learn(build_run):
    built = build_run("model=ssd_mini", "data.batch_size=2", "model.freeze_backbone=true")
    before = {name: p.clone() for name, p in built.task.learner.model.named_parameters()}
    built.task.train_step(0)
    for name, own in built.task.learner.model.named_parameters():
        assert torch.equal(own, before[name]) == name.startswith(("features.", "norms."))


def test_gradients_of_the_small_one_underflow_behind_the_norm_alone():
    """The frozen control rests on this: the heads' gradients fit FP16, earlier ones do not."""
    network, lost = configured("ssd_mini", **DIGITS), {}
    given = {"batch_size": 8, "seed": 0, "device": "cpu", "value_range": "mean_subtracted"}
    data = configured("digit_canvases", **given)

    def watch(name):
        def hook(module, inside, outside):
            there = outside[0][outside[0] != 0].abs()
            lost[name] = (there < 2.0**-25).float().mean().item()

        return hook

    for name, layer in network.named_modules():
        if isinstance(layer, nn.Conv2d) and name != "features.0":  # images have no gradient
            layer.register_full_backward_hook(watch(name))
    network(*data.train_batch(0)).loss.backward()
    assert len(lost) == 11
    for name, share in lost.items():
        assert share < 0.001 if name.startswith(("offsets", "classes")) else share > 0.1, name


# VGG-16's convolutions; 3x3, two scores and four offsets for 9 anchors; fc6 and fc7; a score and
# four offsets for 21 classes.
PY_FASTER_RCNN = 14_714_688, 2_359_808 + 513 * 9 * 6, 102_764_544 + 16_781_312, 4_097 * 21 * 5


@pytest.mark.parametrize(
    ("network", "given", "published"),
    [
        ("ssd300", VOC, 26_285_486),  # torchvision's ssd300_vgg16 with 21 classes
        ("ssd_mini", DIGITS, 88_764),
        ("faster_rcnn", VOC | {"variant": "vgg16", "image_size": 600}, sum(PY_FASTER_RCNN)),
        ("faster_rcnn", DIGITS, 115_581),
    ],
)
def test_published_counts(network, given, published):
    with torch.device("meta"):
        made = configured(network, **given)
    assert sum(p.numel() for p in made.parameters()) == published
