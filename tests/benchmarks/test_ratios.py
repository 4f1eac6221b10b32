"""`benchmarks.suite --ratios`: what it sets beside each other, and what it compiles ahead."""

from dataclasses import replace

import pytest
import torch

from benchmarks.suite.__main__ import parse
from benchmarks.suite.compile_ahead import _compiles
from benchmarks.suite.contest import Suite
from benchmarks.suite.models import GPU_RATIOS
from benchmarks.suite.targets import against_peers
from mprun.extensions.bench.cases import EAGER
from mprun.extensions.bench.runner import RunnerContender
from mprun.extensions.bench.summary import summarise

CUDA = torch.device("cuda")


def planned(monkeypatch, *arguments):
    """The cases of each network, planned for a GPU that nobody asks."""
    for name in ("mprun.extensions.bench.contest", "benchmarks.suite.contenders"):
        monkeypatch.setattr(f"{name}.why_unsupported", lambda *_: None, raising=False)
        monkeypatch.setattr(f"{name}.why_no_lstm", lambda *_: None, raising=False)
    monkeypatch.setattr("mprun.precision.why_unsupported", lambda *_: None)
    monkeypatch.setattr("mprun.precision.why_no_lstm", lambda *_: None)
    groups, _ = Suite().plan(parse(["--ratios", *arguments]), CUDA)
    return {group.label: group.cases for group in groups}


@pytest.mark.slow
def test_each_network_is_eager_and_compiled_beside_both_recipes(monkeypatch):
    cases = planned(monkeypatch)
    assert list(cases) == [group.label for group in GPU_RATIOS]
    assert [label.split()[0] for label in cases] == "ResNet-50 GPT-2 AlexNet bigLSTM DCGAN".split()
    for label, own in cases.items():
        wanted = {"mprun", "mprun+", "amp", "amp+"}
        if own[0].config().train.compile != "off":
            wanted |= {EAGER}
        half = [case for case in own if case.mode in ("amp", "amp_bf16")]
        assert {case.contender for case in half} == wanted, label
        assert half[-1].contender == "amp+"  # what is cut off is not the ratio to torch.amp
        compiled = {case.contender for case in own if _compiles(case)}
        assert compiled == (set() if label.startswith("bigLSTM") else {"mprun+", "amp+"})
    fp8 = [case for case in cases["GPT-2 b12"] if case.mode == "fp8_tensorwise"]
    assert {"mprun", "mprun+"} <= {case.contender for case in fp8}


def test_where_the_default_compiles_it_is_also_measured_without(monkeypatch):
    plain = Suite.groups

    def compiling(*arguments):
        return [
            replace(group, overrides=(*group.overrides, "train.compile=default"))
            for group in plain(*arguments)
        ]

    monkeypatch.setattr(Suite, "groups", compiling)
    found = planned(monkeypatch, "--only", "DCGAN")["DCGAN b128"]
    [case] = [case for case in found if case.contender == EAGER]
    # That contender is eager whatever the configuration says.
    tiny = ("model=conv_autoencoder", "data.batch_size=2")
    case = replace(case, mode="fp32", overrides=(*tiny, "train.compile=default"))
    assert RunnerContender(case, torch.device("cpu")).settings()["compile"] == "off"


def test_fp8_is_held_against_both_recipes_in_bf16():
    def row(mode, contender, rate):
        case = {"label": "GPT-2 b12", "mode": mode, "contender": contender, "real_data": False}
        windows = [{"samples": rate, "seconds": 1.0, "cohort": 1, "round": i} for i in range(5)]
        windows = [window | {"energy_mj": None, "data_wait_s": None} for window in windows]
        return {"case": case, "windows": windows, "facts": {}, "limit": {}, "details": {}}

    rows = [row("amp_bf16", "amp", 2.0), row("amp_bf16", "amp+", 4.0)]
    rows.append(row("fp8_tensorwise", "mprun+", 6.0))
    summarise(rows)
    against_peers(rows)
    ratios = rows[-1]["summary"]["ratios"]
    assert (ratios["recipe"]["median"], ratios["recipe+"]["median"]) == (3.0, 1.5)
