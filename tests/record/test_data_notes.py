"""run.json lists replaced files, over several attempts at a run."""

from mprun.training.announcements import replaced, replaced_line

from ..helpers import configured


class Replacing:
    """A source that has replaced images `numbers` of a training split below `root`."""

    def __init__(self, numbers, root="old"):
        self.numbers, self.root = numbers, root

    def replaced_files(self):
        return {f"train/{n}": f"{self.root}/{n}.png" for n in self.numbers}


def test_files_are_counted_once_over_all_attempts():
    first = replaced(Replacing(range(30)), {})
    assert first["replaced"] == 30
    assert first["replaced_files"] == [f"old/{n}.png" for n in range(20)]
    # 5 known ones, which are not among the 20 that are named, and 10 new ones.
    second = replaced(Replacing(range(25, 40)), first)
    assert second["replaced"] == 40 and second["replaced_files"] == first["replaced_files"]
    assert replaced(Replacing([]), second) == second
    assert " 40 files " in replaced_line(second) and "and 37 more" in replaced_line(second)


def test_moved_files_are_the_same():
    first = replaced(Replacing([1, 2]), {})
    second = replaced(Replacing([2, 3], root="new"), first)
    assert second["replaced"] == 3
    assert second["replaced_files"] == ["old/1.png", "old/2.png", "new/3.png"]


def test_other_sources_replace_nothing():
    digits = configured("digits", image_size=8, batch_size=100, seed=0, device="cpu")
    assert replaced(digits, {"replaced": 3}) == {}
