"""A run of several processes: the first writes it, it ends in all of them, and ranks that drift
apart are noticed."""

import json

import pytest

from mprun.record.metrics import read_metrics

from ..distributed.test_same_bits import each_rank
from .runs_of_two_ranks import SPOILT, STEPS, be

pytestmark = pytest.mark.slow
CASES = ["usual", "diverges", "drifts", "first evaluates", "first alone"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(folder, what each of two ranks saw by case)."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, each_rank(be, 2, CASES, folder)


def record(folder, case):
    """run.json of the one run of a case."""
    [directory] = (folder / case).iterdir()
    return json.loads((directory / "run.json").read_text()), directory


@pytest.mark.parametrize("case", ["usual", "first evaluates"])
def test_the_first_writes_and_all_end(found, case):
    folder, ranks = found
    run, directory = record(folder, case)
    expected = {"directory": directory, "status": "done", "steps": STEPS, "evaluated": True}
    assert ranks == [own | {case: {k: str(v) for k, v in expected.items()}} for own in ranks]
    assert (run["status"], run["last_step"], run["ranks"]) == ("done", STEPS, {"world": 2})
    assert run["final"] == {"loss": 0.5}  # of the first
    rows = [row for row in read_metrics(directory / "metrics.jsonl") if row["split"] == "train"]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]


def test_a_divergence_of_the_first_ends_all(found):
    folder, ranks = found
    run, _ = record(folder, "diverges")
    assert (run["status"], run["last_step"]) == ("diverged", SPOILT + 1)
    for rank in ranks:
        own = rank["diverges"]
        # Both leave after the step at which the first has read its losses.
        assert (own["status"], own["steps"], own["evaluated"]) == ("diverged", "4", "False")


def test_ranks_with_other_weights_are_named(found):
    folder, ranks = found
    run, _ = record(folder, "drifts")
    said = (
        f"after step {STEPS} process 1 has another model.bias than process 0: they do not train "
        "the same model"
    )
    assert [rank["drifts"] for rank in ranks] == [{"said": said}] * 2
    assert (run["status"], run["cause"]) == ("failed", said)


def test_a_run_of_the_first_alone_waits_for_nobody(found):
    folder, ranks = found
    assert [rank["first alone"] for rank in ranks] == [{}, {}]
    assert record(folder, "first alone")[0]["status"] == "done"
