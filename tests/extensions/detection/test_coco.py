"""COCO's JSON on small trees: boxes, classes, crowds, and what is refused."""

import json

import numpy as np
import pytest
import torch

from mprun.data.source import DamagedData, DataError

from ...helpers import ONE_CORE, configured, raises_line, run
from .made_images import SETTINGS, SIZE, save_image

DOG = {"category_id": 18, "bbox": [6, 4, 30, 20], "iscrowd": 0, "area": 600}
CROWD = {"category_id": 1, "bbox": [0, 0, 60.5, 40], "iscrowd": 1}
FLAT = {"category_id": 1, "bbox": [3, 3, 0, 10], "iscrowd": 0}
IMAGE = {"id": 100, "file_name": f"{0:012}.jpg", "width": SIZE[0], "height": SIZE[1]}
CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 1, "name": "person"}, {"id": 90, "name": "brush"}]


def instances(objects):
    """objects: of each image those that it has."""
    images = [
        IMAGE | {"id": 100 - n, "file_name": f"{n:012}.jpg", "url": ""} for n in range(len(objects))
    ]
    annotations = [
        own | {"image_id": 100 - n, "id": 7 * n, "segmentation": []}
        for n, found in enumerate(objects)
        for own in found
    ]
    return {"info": {}, "images": images, "annotations": annotations, "categories": CATEGORIES}


def put(root, split, found):
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(found))
    for place in range(len(found["images"])):
        save_image(root / split / f"{place:012}.jpg", place)


def made(root):
    put(root, "train2017", instances([[DOG, CROWD], [], [CROWD], [DOG, FLAT, DOG], [DOG]]))
    put(root, "val2017", instances([[DOG, CROWD], []]))
    return root


def coco(root, **more):
    return configured("coco", root=str(root), **SETTINGS | more)


def test_boxes_classes_and_crowds(tmp_path):
    source = coco(made(tmp_path))
    [(images, targets)] = source.eval_batches()
    assert images.shape == (2, 3, 32, 32) and images.dtype is torch.float32
    dog = [6 / 60, 4 / 40, 36 / 60, 24 / 40, 1, 0]  # classes in the order of their ids
    crowd = [0, 0, 1, 1, 0, 1]  # clipped
    torch.testing.assert_close(targets[0], torch.tensor([dog, crowd]))
    assert (targets[1, :, 4] == -1).all()
    about = source.description
    # Without an image that has no object, and one that has a crowd alone.
    assert (about["train_samples"], about["left_out"], about["num_classes"]) == (3, 2, 3)
    split = source._train.loader.reader.split
    assert np.diff(split.starts).tolist() == [1, 2, 1] and not split.rows[:, 5].any()
    assert split.images.name(1).endswith("train2017/000000000003.jpg")


def of_one(changed):
    """A dog with a fault alone."""
    return {"annotations": [DOG | {"image_id": 100} | changed]}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"annotations": [DOG | {"image_id": 5}]}, "annotation 0: has image_id 5"),
        (of_one({"category_id": 2}), "annotation 0: has category_id 2"),
        (
            of_one({"bbox": [50, 0, 12, 3]}),
            "annotation 0: has the box (50.0, 0.0, 12.0, 3.0), which must lie inside its 60 x 40",
        ),
        ({"annotations": [{"image_id": 100}]}, "is not an instances file of COCO: "),
        ({"categories": CATEGORIES[:2]}, "its categories must be those of train2017"),
        ({"images": [IMAGE | {"file_name": "../a.jpg"}]}, "must be a path inside the image folder"),
        ({"images": []}, "has image_id 100"),
        (
            {"images": 2 * [IMAGE]},
            "val2017.json: each id of an image must be unique, but 100 occurs",
        ),
        (
            {"images": [IMAGE, IMAGE | {"id": 5}]},
            "each file_name of an image must be unique, but 000000000000.jpg",
        ),
        (
            {"categories": [*CATEGORIES, CATEGORIES[0]]},
            "each id of a category must be unique, but 18 occurs twice",
        ),
        ({"images": [IMAGE | {"height": 0}]}, "gives image 100 60 x 0 pixels"),
        ({"images": [IMAGE | {"width": 10**30}]}, "instances_val2017.json: "),
        ({"images": [IMAGE | {"file_name": "a\0.jpg"}]}, "must be a path inside the image folder"),
    ],
)
def test_damage_is_one_line(tmp_path, changed, says):
    made(tmp_path)
    put(tmp_path, "val2017", instances([[DOG]]) | changed)
    with raises_line(DamagedData, says):
        coco(tmp_path)


def test_missing_files(tmp_path):
    made(tmp_path)
    with raises_line(DataError, "annotations/instances_val2014.json: no such file"):
        coco(tmp_path, eval_folder="val2014")
    path = tmp_path / "annotations/instances_train2017.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b".jpg", b".\xffg"))
    said = "instances_train2017.json: is not an instances file of COCO: 'utf-8' codec"
    with raises_line(DamagedData, said):
        coco(tmp_path)
    path.write_bytes(whole)
    (tmp_path / "val2017" / "000000000001.jpg").unlink()
    with raises_line(DamagedData, "val2017/000000000001.jpg: cannot be read"):
        coco(tmp_path)


def test_the_command_trains(tmp_path, capsys):
    made(tmp_path / "coco")
    command = ["model=ssd_mini", "data=coco", f"data.root='{tmp_path / 'coco'}'", *ONE_CORE]
    command += ["data.image_size=32", "data.batch_size=2", "train.steps=2", "data.workers=0"]
    assert run(tmp_path / "run", *command) == 0
    assert run(tmp_path / "other", *command, "data.train_folder=../x") == 2
    assert "data.train_folder=../x: must be a path below data.root" in capsys.readouterr().err
