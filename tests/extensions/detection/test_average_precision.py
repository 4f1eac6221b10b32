"""VOC 2007's average precision: cases by hand, and a second form of its definition."""

import math

import numpy as np
import pytest

from mprun.extensions.detection.task import average_precisions

NONE = [0, 0, 0, 0, -1, 0]


def box(left, top, right, bottom, name, last):
    """A target (last: difficult) or a detection (last: score), in tenths of the side."""
    return [left / 10, top / 10, right / 10, bottom / 10, name, last]


def ap(detections, targets, classes=1):
    """Return the average precision of images given as lists of rows, which are padded."""
    padded = []
    for images in (detections, targets):
        most = max(1, *map(len, images))
        padded.append(np.array([[*own, *[NONE] * (most - len(own))] for own in images], np.float32))
    return average_precisions(*padded, classes).tolist()


A, B = box(0, 0, 4, 4, 0, 0), box(5, 5, 9, 9, 0, 0)
LOW = box(0, 6, 2, 8, 0, 0.9)  # overlaps nothing
BY_HAND = {
    "all found, and nothing else": ([[*A[:5], 0.9], [*B[:5], 0.8]], [A, B], 1),
    # Recalls 0, 0.1, ..., 0.5 have precision 1, the five above have none.
    "half found": ([[*A[:5], 0.9]], [A, B], 6 / 11),
    "a false one before": ([LOW, [*A[:5], 0.8]], [A], 0.5),
    "a false one behind": ([[*LOW[:5], 0.7], [*A[:5], 0.8]], [A], 1),
    # Right, false, right: precision 1 up to a recall of 0.5, then 2/3.
    "a duplicate": (
        *([[*A[:5], 0.9], box(0, 0, 4, 3.5, 0, 0.8), [*B[:5], 0.7]], [A, B]),
        (6 + 5 * 2 / 3) / 11,
    ),
    # Both overlap A most, 3.9/4.1 > 0.5, and the near one by less.
    "a duplicate does not take the second best object": (
        [[*A[:5], 0.9], box(0, 0.1, 4, 4.1, 0, 0.8)],
        [A, box(0, 1, 4, 5, 0, 0)],
        6 / 11,
    ),
    "an overlap of a half is enough": ([box(0, 0, 4, 2, 0, 0.9)], [A], 1),
    "an overlap of less is not": ([box(0, 0, 4, 1.9, 0, 0.9)], [A], 0),
    "not a number": ([box(math.nan, 0, 4, 4, 0, 0.9)], [A], 0),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_one_image_by_hand(case):
    detections, targets, expected = BY_HAND[case]
    assert ap([detections], [targets]) == [pytest.approx(expected)]


def test_three_of_ten_reach_the_recall_of_three_tenths():
    images = [[A]] * 10
    found = [[box(0, 0, 4, 4, 0, 0.9)] if i < 3 else [] for i in range(10)]
    assert ap(found, images) == [pytest.approx(4 / 11)]  # 0.3 < 3 * 0.1 in floating point


def test_a_difficult_object_is_neither_asked_for_nor_wrong():
    hard = [*B[:5], 1]
    assert ap([[box(5, 5, 9, 9, 0, 0.9), box(0, 0, 4, 4, 0, 0.8)]], [[A, hard]]) == [1.0]
    assert ap([[box(0, 0, 4, 4, 0, 0.8)]], [[A, hard]]) == [1.0]
    # Found twice it is still no fault.
    assert ap([[box(5, 5, 9, 9, 0, 0.9)] * 2 + [box(0, 0, 4, 4, 0, 0.1)]], [[A, hard]]) == [1.0]


def test_a_class_without_objects_has_no_value_and_one_that_is_never_found_has_zero():
    found = ap([[box(0, 0, 4, 4, 1, 0.9)]], [[A]], classes=3)
    assert found[0] == 0.0 and math.isnan(found[1]) and math.isnan(found[2])
    only_hard = ap([[box(0, 0, 4, 4, 0, 0.9)]], [[[*A[:5], 1]]])
    assert math.isnan(only_hard[0])


def by_definition(detections, targets, name):
    """The rules of the challenge, one detection after the other, in Python's numbers."""
    wanted = sum(1 for image in targets for t in image if t[4] == name and not t[5])
    if not wanted:
        return math.nan
    ranked = [(d[5], i, d) for i, image in enumerate(detections) for d in image if d[4] == name]
    ranked.sort(key=lambda entry: -entry[0])
    taken, right, all_counted, curve = set(), 0, 0, []
    for _, i, d in ranked:
        best, place = -1.0, None
        for k, t in enumerate(targets[i]):
            if t[4] != name:
                continue
            w = min(d[2], t[2]) - max(d[0], t[0])
            h = min(d[3], t[3]) - max(d[1], t[1])
            common = max(w, 0.0) * max(h, 0.0)
            union = (d[2] - d[0]) * (d[3] - d[1]) + (t[2] - t[0]) * (t[3] - t[1]) - common
            if common / union > best:
                best, place = common / union, k
        if best >= 0.5 and targets[i][place][5]:
            continue
        all_counted += 1
        if best >= 0.5 and (i, place) not in taken:
            taken.add((i, place))
            right += 1
        curve.append((right, right / all_counted))
    points = [[p for r, p in curve if 10 * r >= k * wanted] for k in range(11)]
    return sum(max(point, default=0.0) for point in points) / 11


@pytest.mark.parametrize("seed", range(5))
def test_random_boxes_as_by_definition(seed):
    generator = np.random.default_rng(seed)
    images, classes = 40, 4

    def boxes(n):
        corner = generator.integers(0, 8, (n, 2))
        return np.concatenate([corner, corner + generator.integers(1, 5, (n, 2))], 1) / 16

    targets, detections = [], []
    for _ in range(images):
        m, extra = generator.integers(0, 6), generator.integers(0, 8)
        own = boxes(m)
        names = generator.integers(0, classes, m)
        hard = generator.random(m) < 0.2
        targets.append(np.column_stack([own, names, hard]).tolist())
        near = np.concatenate([own, own, boxes(extra)])
        near[:, 2:] += generator.integers(0, 3, (len(near), 2)) / 32
        labels = np.concatenate([names, names, generator.integers(0, classes, extra)])
        detections.append(np.column_stack([near, labels, generator.random(len(near))]).tolist())
    detections = [[[*map(np.float32, row)] for row in image] for image in detections]
    found = ap(detections, targets, classes)
    for name in range(classes):
        assert found[name] == pytest.approx(by_definition(detections, targets, name), abs=1e-12)
    assert 0.05 < np.mean(found) < 0.95
