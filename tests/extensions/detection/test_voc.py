"""The reader of PASCAL VOC on small trees: layout, boxes, augmentation, and what is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from mprun.data.source import DamagedData, DataError
from mprun.extensions.detection.annotations import CLASSES, read_annotation

from ...helpers import ONE_CORE, configured, raises_line, run
from .made_images import SETTINGS, SIZE, save_image


def annotation(*objects, size=SIZE):
    """XML as VOC has it; objects: (name, xmin, ymin, xmax, ymax, difficult)."""
    rows = "".join(
        f"<object><name>{name}</name><pose>Left</pose><difficult>{difficult}</difficult><bndbox>"
        f"<xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax><ymax>{d}</ymax></bndbox><part><name>head"
        "</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"
        "</object>"
        for name, a, b, c, d, difficult in objects
    )
    width, height = size
    return (
        f"<annotation><folder>VOC</folder><size><width>{width}</width><height>{height}</height>"
        f"<depth>3</depth></size>{rows}</annotation>"
    )


def put(root, year, split, samples):
    """A list of images with their annotations and files, all of one colour per place."""
    folder = root / "VOCdevkit" / f"VOC{year}"
    for name in ("Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "ImageSets/Main" / f"{split}.txt").write_text("".join(f"{n}\n" for n in samples))
    for place, (name, text) in enumerate(samples.items()):
        (folder / "Annotations" / f"{name}.xml").write_text(text)
        save_image(folder / "JPEGImages" / f"{name}.jpg", place)
    return folder


DOG, CAR = ("dog", 7, 5, 36, 24, 0), ("car", 1, 1, 60, 40, 0)


def made(root):
    own = {f"00000{i}": annotation(DOG, (*CAR[:5], i % 2)) for i in range(4)}
    put(root, "2007", "trainval", own)
    put(root, "2012", "trainval", {"2008_000001": annotation(CAR), "2008_000002": annotation()})
    held_out = {"000010": annotation(DOG, (*CAR[:5], 1)), "000011": annotation()}
    put(root, "2007", "test", held_out)
    return root


@pytest.fixture
def root(tmp_path):
    return made(tmp_path)


def voc(root, **more):
    return configured("voc", root=str(root), **SETTINGS | more)


def test_held_out_images_and_boxes(root):
    source = voc(root)
    [(images, targets)] = source.eval_batches()
    assert images.shape == (2, 3, 32, 32) and images.dtype is torch.float32
    # Coordinates from 1, right and bottom inclusive.
    dog = [6 / 60, 4 / 40, 36 / 60, 24 / 40, CLASSES.index("dog"), 0]
    car = [0, 0, 1, 1, CLASSES.index("car"), 1]
    torch.testing.assert_close(targets[0], torch.tensor([dog, car]))
    assert (targets[1, :, 4] == -1).all()
    colour = 20 - torch.tensor([123.68, 116.779, 103.939])
    torch.testing.assert_close(images[0, :, 16, 16], colour, atol=2, rtol=0)
    about = source.description
    assert (about["train_samples"], about["eval_samples"], about["num_classes"]) == (6, 2, 20)
    assert voc(root, years="2007").description["train_samples"] == 4


def test_difficult_objects_are_left_out_of_training_or_learned_from(root):
    def objects(difficult):
        split = voc(root, difficult=difficult)._train.loader.reader.split
        targets = np.stack([split.target(place) for place in range(6)])
        return (targets[:, :, 4] >= 0).sum(1).tolist(), targets[:, :, 5].max()

    assert objects(False) == ([2, 1, 2, 1, 1, 0], 0)
    assert objects(True) == ([2, 2, 2, 2, 1, 0], 0)


@pytest.mark.slow
def test_augmented_boxes_stay_on_their_objects(tmp_path):
    folder = put(tmp_path, "2007", "trainval", {"a": annotation(("dog", 11, 11, 30, 30, 0))})
    put(tmp_path, "2007", "test", {"b": annotation(DOG)})
    pixels = np.full((40, 60, 3), 128, np.uint8)
    pixels[10:30, 10:30] = (0, 255, 0)
    Image.fromarray(pixels).save(folder / "JPEGImages" / "a.jpg", quality=100, subsampling=0)
    source = voc(tmp_path, years="2007", batch_size=1, image_size=96, value_range="tanh")
    seen, shapes = 0, set()
    for number in range(40):
        images, targets = source.train_batch(number)
        rows = targets[0][targets[0, :, 4] >= 0]
        assert torch.isfinite(images).all() and (rows[:, :2] < rows[:, 2:4]).all()
        assert ((rows[:, :4] >= 0) & (rows[:, :4] <= 1)).all()
        if not len(rows):
            continue
        left, top, right, bottom = (96 * rows[0, :4]).tolist()
        shapes.add((round(right - left), round(bottom - top)))
        # One channel of the object is far from the two others, whatever the colours have become.
        spread = images[0].amax(0) - images[0].amin(0)
        inside = spread[round(top) : round(bottom), round(left) : round(right)]
        if min(right - left, bottom - top) >= 6 and spread.max() >= 0.5:
            assert inside[2:-2, 2:-2].mean() > 0.8 * spread.max()
            seen += 1
    assert seen > 20 and len(shapes) > 10


def test_half_of_the_images_are_mirrored_and_nothing_else(root):
    data = voc(root, augmentation="flip", years="2007", batch_size=4)
    left, top, right, bottom = 6 / 60, 4 / 40, 36 / 60, 24 / 40
    either = torch.tensor([[left, top, right, bottom], [1 - right, top, 1 - left, bottom]])
    seen = []
    for number in range(8):
        images, targets = data.train_batch(number)
        assert images.shape == (4, 3, 32, 32) and targets.shape[2] == 6
        assert targets.dtype is torch.float32  # as those of digit_canvases
        dogs = targets[targets[..., 4] == CLASSES.index("dog"), :4]
        same = (dogs[:, None] - either).abs().amax(2) < 1e-6
        assert (same.sum(1) == 1).all()
        seen += same[:, 1].tolist()
    assert 6 < sum(seen) < 26  # of 32; 5 of 10,000 orders are outside


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not an annotation of VOC: no element found"),
        (annotation(DOG)[:200], "not an annotation of VOC: "),
        ('<!DOCTYPE a [<!ENTITY b "dog">]>' + annotation(DOG), "declares a document type"),
        (
            f'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "{"x" * 99}"><!ENTITY c '
            f'"{"&b;" * 99}">]><a>&c;</a>',
            "declares a document type",
        ),
        (annotation(("unicorn", 1, 1, 5, 5, 0)), "object 1 is a 'unicorn', which does not exist"),
        (annotation(DOG, ("cat", 1, 1, 70, 40, 0)), "object 2, a cat, has the box 1 1 70 40"),
        (annotation(("cat", 9, 9, 3, 20, 0)), "the box 9 9 3 20, which must lie inside the 60 x"),
        (annotation(("cat", "left", 9, 30, 20, 0)), "bndbox/xmin is 'left', must be a number"),
        (annotation(("cat", "nan", 9, 30, 20, 0)), "bndbox/xmin is 'nan', must be a number"),
        (annotation(size=(0, 40)), "the image has 0 x 40 pixels"),
        ("<annotation/>", "annotation contains no size/width"),
        ("<a>" * 9, "not an annotation"),
        ("x" * 2_000_000, "larger than 1 MiB"),
    ],
)
def test_a_damaged_annotation_is_refused_in_one_line(root, text, said):
    path = root / "VOCdevkit/VOC2007/Annotations/000002.xml"
    path.write_text(text)
    with raises_line(DamagedData, f"{path}: ", said):
        voc(root)


def test_a_box_that_leaves_by_a_fraction_is_clipped(tmp_path):
    path = tmp_path / "a.xml"
    path.write_text(annotation(("cat", 0.5, 1, 60.7, 40, 0)))
    assert read_annotation(str(path)).rows[0, :4].tolist() == [0, 0, 1, 1]


def test_missing_and_wrong_files(root):
    folder = root / "VOCdevkit/VOC2007"
    image, listed = folder / "JPEGImages/000001.jpg", folder / "ImageSets/Main/trainval.txt"
    image.rename(folder / "away.jpg")
    with pytest.raises(DamagedData, match="000001.jpg: cannot be read: No such file"):
        voc(root)
    Image.new("RGB", (61, 40)).save(image)
    with pytest.raises(DamagedData, match="61 x 40 pixels, but its annotation says 60 x 40"):
        for number in range(3):
            voc(root).train_batch(number)
    for names, says in (
        ("../../secret\n", "'../../secret' is not the name of an image"),
        ("000001\n000002\n000001\n", "trainval.txt: lists 000001 twice"),
    ):
        listed.write_text(names)
        with pytest.raises(DamagedData, match=says):
            voc(root)
    listed.unlink()
    with pytest.raises(DataError, match="data.root needs VOCdevkit/VOC2007"):
        voc(root)


@pytest.mark.parametrize("damage", ["layout", "annotation", "image"])
def test_the_command_says_so_in_one_line(root, tmp_path, capsys, damage):
    folder = root / "VOCdevkit/VOC2007"
    if damage == "layout":
        (folder / "ImageSets/Main/test.txt").unlink()
    elif damage == "annotation":
        (folder / "Annotations/000010.xml").write_text("<annotation>")
    else:
        for path in (folder / "JPEGImages").glob("*"):
            path.write_bytes(path.read_bytes()[:300])
    command = ["model=ssd_mini", "data=voc", f"data.root='{root}'", "data.image_size=32"]
    command += ["data.batch_size=2", "data.workers=0", "train.steps=1", *ONE_CORE]
    code = run(tmp_path / "run", *command)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mprun: ")]
    assert code == (2 if damage == "layout" else 4)
    assert "Traceback" not in "".join(lines) and "VOC2007" in lines[-1]
    assert damage == "image" or not (tmp_path / "run").exists()
