"""The command line of the suite: what it refuses, who takes part, in what order."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.suite.__main__ import main, parse
from benchmarks.suite.contest import Suite
from benchmarks.suite.models import CPU_SUITE, GPU_SUITE
from mprun.config.compose import compose_config
from mprun.errors import BadInput

from ..extensions.bench.test_bench_command import CPU, TINY


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--peers", "nobody"], "--peers nobody: no such peer (allowed: all, loop"),
        (
            ["--peers", "loop,amp", "--modes", "fp32,amp", "device=cpu", "model=resnet50"],
            "--peers amp: in no mode asked for (fp32: it has amp, amp_bf16; "
            "amp: amp would run amp on torch's own half kernels",
        ),
        (["--only", "VGG", "device=cpu"], "--only VGG: no such model (allowed: tiny LM b16, "),
        (["--only", "tiny", "model=resnet50"], "--only: chooses models of the suite"),
    ],
)
@pytest.mark.few(2)
def test_bad_input_is_one_line_and_writes_nothing(arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"benchmarks.suite: {line}") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_peers_may_stand_alone_or_with_names():
    assert parse(["--peers", "model=dcgan"]).peers == ["all"]
    assert parse(["--peers", "--json"]).peers == ["all"]
    assert parse(["--peers", "loop,timm"]).peers == ["loop", "timm"]
    assert parse(["--peers=loop"]).peers == ["loop"]
    assert parse([]).peers is None


@pytest.mark.slow
def test_the_suite_takes_what_does_not_choose_a_configuration():
    groups, _ = Suite().plan(parse(["device=cpu", "threads=1", "--modes=fp32"]), CPU)
    assert [group.label for group in groups] == [entry.label for entry in CPU_SUITE]
    assert all(group.cases[0].overrides[-1] == "threads=1" for group in groups)


@pytest.mark.slow
def test_a_peer_runs_in_the_modes_that_it_has_and_what_says_most_is_measured_first():
    def order(peers):
        ((group,), left) = Suite().plan(parse([*TINY, "--modes=fp32,amp_bf16", peers]), CPU)
        assert group.label == "lstm_lm b2" and "device=cpu" not in group.cases[0].overrides
        return [(case.mode, case.contender) for case in group.cases], left

    # Each of mprun's with the peer that makes a ratio of it: a budget may cut off the rest.
    first = [("fp32", "mprun"), ("fp32", "loop"), ("amp_bf16", "mprun"), ("amp_bf16", "amp")]
    found, left_out = order("--peers=loop,amp")
    assert found == first
    left = {(case["mode"], case["contender"]) for case in left_out}
    assert left == {("fp32", "amp"), ("amp_bf16", "loop")}
    found, _ = order("--peers=all")
    assert found[:4] == first
    half = [contender for mode, contender in found if mode == "amp_bf16"]
    assert half[:3] == ["mprun", "amp", "amp+"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "resnet50", "experiment=quickstart_gpt"])
def test_a_configuration_beside_peers_gets_the_rate_that_they_know(model):
    words = [model if "=" in model else f"model={model}", "device=cpu"]

    def rate(*arguments):
        options = parse([*arguments, "--modes", "fp32", *words])
        [group] = Suite().groups(options, torch.device("cpu"))
        return compose_config(list(group.overrides)).config.optim

    assert rate("--peers", "loop").schedule == "constant"
    assert rate("--peers", "loop").warmup_updates == rate("--peers", "loop").warmup_epochs == 0
    assert rate() == compose_config(words).config.optim  # alone each as it is
    words += ["optim.schedule=linear"]
    assert rate("--peers", "loop").schedule == "linear"  # which the check of peers refuses


def test_in_a_suite_the_references_have_the_loop_alone():
    groups, left_out = Suite().plan(parse(["device=cpu", "--peers=all", "--only=tiny"]), CPU)
    assert [group.label for group in groups] == ["tiny LM b16"]
    of_fp32 = [case.contender for case in groups[0].cases if case.mode == "fp32"]
    assert of_fp32 == ["mprun", "loop"]
    reasons = {left["reason"] for left in left_out if left["contender"] == "loop+"}
    assert reasons == {"in a suite the loop alone is the peer in fp32"}
    named = parse(["device=cpu", "--modes=fp32", "--peers=loop+", "--only=tiny"])
    assert [case.contender for case in Suite().plan(named, CPU)[0][0].cases] == ["mprun", "loop+"]


@pytest.mark.parametrize("entry", [*GPU_SUITE, *CPU_SUITE], ids=lambda entry: entry.label)
@pytest.mark.few(4)
def test_every_case_of_the_suites_can_be_configured(entry):
    config = compose_config([*entry.overrides, f"precision={entry.modes[-1]}"]).config
    assert config.data.name.startswith("synthetic_")
    assert f"b{config.data.batch_size}" == entry.label.rpartition(" ")[2]
    assert set(entry.best_modes) <= set(entry.modes) | {"tf32"}


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("benchmarks.suite.contest.find_spec", lambda package: None)
    with pytest.raises(BadInput, match="--peers timm: the package timm is not installed"):
        Suite().plan(parse([*TINY, "--peers=timm"]), CPU)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_bench_on_a_gpu(tmp_path):
    folder = tmp_path / "bench"
    tiny = [override for override in TINY if override != "device=cpu"]
    arguments = (*tiny, "--modes", "fp32,amp", "--peers", "loop,amp", "--budget", "180")
    command = [sys.executable, "-m", "benchmarks.suite", *arguments, "--out", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((folder / "bench.json").read_text())["rows"]
    assert {row["status"] for row in rows} == {"measured"}, [row["reason"] for row in rows]
    own = [row for row in rows if row["case"]["contender"] == "mprun"]
    assert all(row["details"]["synchronisations"] == 0 for row in own)
    assert all(row["details"]["peak"]["allocated"] > 0 for row in rows)
