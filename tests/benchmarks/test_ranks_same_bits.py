"""benchmarks.ranks_same_bits: what it calls equal, and a run of it."""

import json
import sys

import pytest
import torch

from benchmarks import ranks_same_bits as table


def of_a_rank(value, weights=(3.0, 4.0)):
    return {"compared": [value], "weights": torch.tensor(weights).double(), "skipped": 0}


def test_a_verdict_is_on_every_rank():
    alone = of_a_rank("a")
    assert table.verdict(alone, [of_a_rank("a")] * 2) == {
        "equal": True, "skipped": 0, "relative": 0.0
    }  # fmt: skip
    other = of_a_rank("b", (3.0, 4.5))
    assert table.verdict(alone, [other] * 2) == {"equal": False, "skipped": 0, "relative": 0.1}
    assert table.verdict(alone, [of_a_rank("a"), other])["why"].startswith("the ranks differ")
    assert table.verdict(alone, [{"refused": "dist.engine=ddp: no"}]) == {
        "refused": "dist.engine=ddp: no"
    }


def test_a_cell_has_the_worst_of_all_numbers_of_ranks():
    equal, near, far = ({"equal": e, "relative": r} for e, r in ((True, 0), (False, 0), (False, 1)))
    assert table.told({2: equal, 3: equal}) == "="
    assert table.told({2: equal, 3: near}) == "weights ="
    assert table.told({2: far, 3: near}) == "1e+00"
    assert table.told({2: {"refused": "no"}}) == "refused"


@pytest.mark.slow
def test_a_run(tmp_path, monkeypatch):
    words = "--tasks lstm_lm gpt --modes fp32 --worlds 2 --engines fixed --out".split()
    monkeypatch.setattr(sys, "argv", ["ranks_same_bits", *words, str(tmp_path)])
    assert table.main() == 0
    (file,) = tmp_path.glob("*-cpu-ranks.json")
    cells = json.loads(file.read_text())["cells"]
    assert cells["gpt"]["fp32"]["fixed"]["2"]["equal"]
    assert 0 < cells["lstm_lm"]["fp32"]["fixed"]["2"]["relative"] < 1e-6
    assert "| gpt     | =" in file.with_suffix(".md").read_text()
