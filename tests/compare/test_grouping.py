"""Which runs are compared with which, what the arms are called, and what is refused."""

import random
from dataclasses import asdict

import pytest

from mprun.comparison.findings import Arm
from mprun.comparison.grouping import ProtoGroup, cells_of, group_runs, name_groups
from mprun.comparison.load import load_runs
from mprun.config.compose import compose_config
from mprun.config.schema import PrecisionConfig, ScalerConfig
from mprun.errors import BadInput
from mprun.record.keys import flat

from ..helpers import raises_line
from .made_runs import made_run
from .run_folders import write_run, write_study


def grouped(folder, baseline=None, **options):
    runs, notes = load_runs([folder], baseline)
    assert notes == []
    return group_runs(runs, baseline=baseline, **options)


def labels(group):
    return [arm.label for arm in (group.baseline, *group.arms)]


def seeds(arm):
    return [run.seed for run in arm.runs]


def write_two_rates(folder):
    """FP32 and amp at two learning rates: a/ and b/."""
    for name, lr in (("a", 0.05), ("b", 0.1)):
        write_study(folder / name, {"fp32": [1.0], "amp": [1.0]}, overrides={"optim.lr": lr})


def test_modes_and_seeds_make_one_group(tmp_path):
    write_study(tmp_path, {"amp": [1.0] * 3, "fp32": [1.0] * 3})
    for seed in (5, 7):
        write_run(tmp_path / f"bf16-s{seed}", "amp_bf16", seed)
    [group], lines = grouped(tmp_path)
    assert lines == [] and group.notes == []
    assert group.title == group.slug == "lstm_lm-docs_words"
    assert labels(group) == ["fp32", "amp", "amp_bf16"]
    assert [seeds(arm) for arm in (group.baseline, *group.arms)] == [[0, 1, 2], [0, 1, 2], [5, 7]]
    amp = group.arms[0]
    assert amp.differs == {
        "precision.name": ("fp32", "amp"),
        "precision.autocast_dtype": (None, "fp16"),
        "scaler.name": ("none", "dynamic"),
        "scaler.kind": ("none", "dynamic"),
        "scaler.init_scale": (None, 65536.0),
    }
    assert group.baseline.differs == {}
    assert group.keys["optim.lr"] == 0.1 and group.keys["compare.margin"] == 0.01
    assert group.keys["precision.fp32_math"] == "ieee"
    own = {"seed", "name", "output_root", "train.log_every", "precision.name"}
    assert not own & set(group.keys)


def test_what_changes_no_number_separates_no_runs(tmp_path):
    write_run(tmp_path / "a")
    changed = {"name": "x", "output_root": "elsewhere", "train.log_every": 1}
    write_run(tmp_path / "b", "amp", overrides=changed | {"train.checkpoint_every": 5})
    write_run(tmp_path / "c", seed=1, overrides={"cpu_half": "native"})  # FP32: no 16-bit products
    [group], lines = grouped(tmp_path)
    assert labels(group) == ["fp32", "amp"] and seeds(group.baseline) == [0, 1] and lines == []


def test_other_configurations_are_other_groups(tmp_path):
    write_two_rates(tmp_path)
    groups, lines = grouped(tmp_path)
    assert lines == []
    for group, lr in zip(groups, (0.05, 0.1), strict=True):
        assert group.title == f"lstm_lm-docs_words optim.lr={lr}"
        assert group.slug == f"lstm_lm-docs_words-optim.lr-{lr}"
        assert group.baseline.runs[0].keys["optim.lr"] == group.keys["optim.lr"] == lr


def test_scaler_settings_make_arms_that_say_in_what_they_differ(tmp_path):
    write_study(tmp_path, {"fp32": [1.0], "amp": [1.0]})
    for scale in (8.0, 128.0):
        overrides = {"scaler.scale": scale}
        write_run(tmp_path / f"static-{scale:g}", "amp", scaler="static", overrides=overrides)
    write_run(tmp_path / "fp32-scaled", "fp32", scaler="static")
    write_run(tmp_path / "native", "amp_bf16", overrides={"cpu_half": "native"})
    [group], lines = grouped(tmp_path)
    assert lines == []
    static = ["amp (static scale=8)", "amp (static scale=128)"]
    assert labels(group) == ["fp32", "fp32 (static)", "amp", *static, "amp_bf16"]
    assert group.arms[-1].differs["cpu_half"] == ("emulated", "native")


def test_settings_of_the_usual_scaler_are_named_where_they_vary(tmp_path):
    write_run(tmp_path / "fp32")
    write_run(tmp_path / "a", "amp")
    write_run(tmp_path / "b", "amp", overrides={"scaler.init_scale": 1024.0})
    write_run(tmp_path / "c", "amp", overrides={"cpu_half": "native"})
    write_run(tmp_path / "d", "amp_bf16")
    write_run(tmp_path / "e", "amp_bf16", overrides={"cpu_half": "native"})
    [group], _ = grouped(tmp_path)
    assert labels(group)[1:] == [
        "amp (dynamic cpu_half=emulated init_scale=65536)",
        "amp (dynamic cpu_half=emulated init_scale=1024)",
        "amp (dynamic cpu_half=native init_scale=65536)",
        "amp_bf16 (cpu_half=emulated)",
        "amp_bf16 (cpu_half=native)",
    ]


def test_a_mode_with_an_override_is_no_baseline(tmp_path):
    write_run(tmp_path / "a", "fp32", precision={"mode": "fp32+head=fp16", "scaler": "none"})
    for name, rate in (("b", 0.1), ("c", 0.2)):
        write_run(tmp_path / name, "amp", overrides={"optim.lr": rate})
    groups, [line, _] = grouped(tmp_path)  # one for each configuration
    assert groups == [] and line == (
        f"lstm_lm-docs_words: fp32+head=fp16, amp (2 runs, e.g. {tmp_path / 'a'}): not compared, "
        "no FP32 runs (precision=fp32, scaler=none) were given"
    )


def test_a_configuration_without_baseline_names_the_nearest_one(tmp_path):
    far = {"optim.lr": 0.5, "data.batch_size": 40, "train.steps": 9, "device": "cuda"}
    write_run(tmp_path / "far", overrides=far)
    write_run(tmp_path / "near", overrides={"optim.lr": 0.2})
    write_run(tmp_path / "amp", "amp", overrides={"data.batch_size": 40})
    groups, lines = grouped(tmp_path)
    assert groups == []
    assert lines[0] == (
        "data.batch_size (20, here 40), optim.lr (0.2, here 0.1): not as in the nearest FP32 runs "
        f"({tmp_path / 'near'}), so not compared: lstm_lm-docs_words: amp (1 run, e.g. "
        f"{tmp_path / 'amp'}); run it with precision=fp32, or --allow data.batch_size,optim.lr"
    )
    assert [line.partition(":")[2] for line in lines[1:]] == [
        f" fp32 alone (1 run, e.g. {tmp_path / name}): nothing to compare it with"
        for name in ("far", "near")
    ]


def test_a_wholly_other_configuration_gets_no_hint_to_allow_it(tmp_path):
    write_run(tmp_path / "fp32")
    keys = ("model.hidden_size", "data.batch_size", "optim.lr", "train.steps", "compare.window")
    overrides = dict.fromkeys(keys, 7) | {"model.name": "other"}
    write_run(tmp_path / "amp", "amp", overrides=overrides)
    _, lines = grouped(tmp_path)
    assert " more keys: not as in" in lines[0]
    assert lines[0].endswith("; run it with precision=fp32")


def test_allowed_keys_join_the_group_and_show_in_the_label(tmp_path):
    write_study(tmp_path, {"fp32": [1.0] * 2, "amp": [1.0] * 2})
    write_study(tmp_path / "slow", {"amp": [1.0] * 2}, overrides={"optim.lr": 0.05})
    write_run(tmp_path / "slower", overrides={"optim.lr": 0.02})
    groups, lines = grouped(tmp_path)
    assert len(groups) == 1 and labels(groups[0]) == ["fp32", "amp"] and len(lines) == 2
    [group], lines = grouped(tmp_path, allow=("optim.lr",))
    assert lines == []
    # The baseline is the FP32 configuration that most runs of other modes agree with.
    assert labels(group) == ["fp32", "fp32 optim.lr=0.02", "amp", "amp optim.lr=0.05"]
    assert group.baseline.runs[0].keys["optim.lr"] == 0.1
    assert group.arms[2].differs["optim.lr"] == (0.1, 0.05)
    assert "optim.lr" not in group.keys and group.title == "lstm_lm-docs_words"
    # A group of keys at once.
    assert labels(grouped(tmp_path, allow=("optim",))[0][0]) == labels(group)


def test_two_possible_baselines_are_refused_until_one_is_given(tmp_path):
    write_two_rates(tmp_path)
    first, second = (tmp_path / name / "fp32-s0" for name in "ab")
    both = f"--allow optim.lr: {first} and {second} could both be the baseline (they differ in "
    both += "optim.lr (0.05, here 0.1)); choose one with --baseline PATH"
    with raises_line(BadInput, both):
        grouped(tmp_path, allow=("optim.lr",))
    [group], _ = grouped(tmp_path, second, allow=("optim.lr",))
    assert labels(group) == ["fp32", "fp32 optim.lr=0.05", "amp", "amp optim.lr=0.05"]


def test_an_allowed_key_that_no_run_has_is_bad_input(tmp_path):
    write_run(tmp_path / "fp32")
    for key, said in (("optim.lrr", "did you mean 'optim.lr'"), ("opt", "no run has this key")):
        with raises_line(BadInput, f"--allow {key}: no run ", said):
            grouped(tmp_path, allow=(key,))


@pytest.mark.parametrize("key", "precision scaler.scale seed train.log_every cpu_half".split())
def test_an_allowed_key_that_may_differ_anyway_is_bad_input(tmp_path, key):
    write_study(tmp_path, {"fp32": [1.0], "amp": [1.0]})
    with raises_line(BadInput, f"--allow {key}: this key may always differ; omit it"):
        grouped(tmp_path, allow=[key])


def test_a_given_baseline_may_be_any_mode_even_fp32_against_fp32(tmp_path):
    three = [1.0] * 3
    write_study(tmp_path / "old", {"fp32": three})
    write_study(tmp_path / "new", {"fp32": three, "amp": three})
    write_study(tmp_path / "amp", {"amp": three})
    [group], lines = grouped(tmp_path / "new", tmp_path / "old")
    assert labels(group) == ["fp32", "fp32 (other)", "amp"] and lines == []
    assert all(run.path.startswith(str(tmp_path / "old")) for run in group.baseline.runs)
    assert seeds(group.arms[0]) == [0, 1, 2]
    [group], _ = grouped(tmp_path / "new", tmp_path / "amp")
    assert labels(group) == ["amp", "fp32", "amp (other)"]
    # A folder that is no single arm is refused.
    with raises_line(BadInput, "--baseline: ", "precision.name ", "name runs of one configuration"):
        grouped(tmp_path / "old", tmp_path / "new")


def test_the_order_of_runs_changes_nothing(tmp_path):
    write_study(tmp_path, {"fp32": [1.0] * 12, "amp": [1.0] * 12})
    runs, _ = load_runs([tmp_path])
    [expected], _ = group_runs(runs)
    for seed in range(20):
        random.Random(seed).shuffle(runs)
        [group], _ = group_runs(runs)
        for arm, other in ((expected.baseline, group.baseline), (expected.arms[0], group.arms[0])):
            assert [run.path for run in arm.runs] == [run.path for run in other.runs]


def test_runs_without_an_outcome_are_named(tmp_path):
    write_study(tmp_path, {"fp32": [1.0] * 3, "amp": [1.0]})
    write_run(tmp_path / "amp-s1", "amp", 1, status="diverged")
    write_run(tmp_path / "amp-s2", "amp", 2, status="failed", cause="OutOfMemory: no\nmore")
    write_run(tmp_path / "amp-s3", "amp", 3, status="preempted", cause="SIGTERM")
    write_run(tmp_path / "bf16-s0", "amp_bf16", 0, status="running")
    [group], _ = grouped(tmp_path)
    amp, bf16 = group.arms
    assert seeds(amp) == [0, 1]
    # Without a checkpoint nothing can go on, so no command is named.
    at = "seed 3: preempted at step 40 (SIGTERM)"
    assert amp.notes == ["seed 2: failed (OutOfMemory: no)", at]
    assert bf16.runs == [] and bf16.notes == ["seed 0: running"]


def test_a_baseline_without_an_outcome_compares_nothing(tmp_path):
    write_run(tmp_path / "fp32", status="failed", cause="full disk")
    write_run(tmp_path / "amp", "amp")
    groups, [line] = grouped(tmp_path)
    said = "lstm_lm-docs_words: not compared, the baseline fp32 has no run with an outcome "
    assert groups == [] and line == said + "(seed 0: failed (full disk))"


def test_margins_that_differ_are_not_compared_unless_the_command_line_gives_one(tmp_path):
    write_run(tmp_path / "fp32")
    write_run(tmp_path / "amp", "amp", overrides={"compare.margin": 0.05})
    groups, lines = grouped(tmp_path)
    assert groups == [] and "compare.margin (0.01, here 0.05)" in lines[0]
    [group], lines = grouped(tmp_path, judged_otherwise=True)
    assert labels(group) == ["fp32", "amp"] and lines == []
    assert "compare.margin" not in group.keys and group.keys["compare.metric"] == "loss"
    # Over how many evaluations an outcome is taken, no option says.
    write_run(tmp_path / "bf16", "amp_bf16", overrides={"compare.window": 3})
    [group], [line] = grouped(tmp_path, judged_otherwise=True)
    assert "compare.window (1, here 3)" in line


def test_of_one_seed_twice_in_an_arm_the_first_counts(tmp_path):
    write_run(tmp_path / "a", created="2026-11-20T12:00:00+00:00")
    native = {"cpu_half": "native"}
    write_run(tmp_path / "b", created="2026-11-20T11:00:00+00:00", overrides=native)
    write_run(tmp_path / "c", "amp")
    [group], _ = grouped(tmp_path)
    assert [run.path for run in group.baseline.runs] == [str(tmp_path / "b")]
    [note] = group.baseline.notes
    assert note.startswith(f"{tmp_path / 'a'}: left out (done), same arm and seed as")


def test_environments_that_differ_are_noted(tmp_path):
    write_run(tmp_path / "fp32")
    other = {"packages": {"torch": "2.14.0"}, "device": "cuda", "gpu": "H200"}
    write_run(tmp_path / "amp", "amp", environment=other)
    write_run(tmp_path / "bf16", "amp_bf16", environment={"commit": "b" * 40, "dirty": True})
    [group], _ = grouped(tmp_path)
    assert group.notes == [
        "torch differs: 2.15.0 (fp32, amp_bf16); 2.14.0 (amp)",
        "device differs: EPYC (cpu) (fp32, amp_bf16); H200 (cuda) (amp)",
        "commit of mprun differs: aaaaaaaaaaaa (fp32, amp); bbbbbbbbbbbb (amp_bf16)",
        "recorded with uncommitted changes to mprun: amp_bf16; their code may differ",
    ]


def test_arms_of_which_one_was_compiled_are_noted(tmp_path):
    write_run(tmp_path / "fp32", execution={"compile": "off: compiled steps take 9 ms"})
    write_run(tmp_path / "amp", "amp", execution={"compile": "on: 5 ms a step, eager 10 ms"})
    write_run(tmp_path / "bf16", "amp_bf16", execution={"compile": "default"})
    write_run(tmp_path / "older", "fp16_master")
    [group], _ = grouped(tmp_path)
    [note] = group.notes
    told = "eager (fp32, fp16_master); compiled (amp, amp_bf16)"
    assert note == f"execution of steps differs: {told}"


def test_runs_that_leave_compilation_to_a_clock_are_compared_with_eager_ones(tmp_path):
    write_run(tmp_path / "of_before", overrides={"train.compile": "off"})
    write_run(tmp_path / "amp", "amp", overrides={"train.compile": "auto"})
    write_run(tmp_path / "asked", "amp_bf16", overrides={"train.compile": "default"})
    [group], _ = grouped(tmp_path, allow=["train.compile"])
    named = [label for label in labels(group) if "train.compile" in label]
    assert named == ["amp_bf16 train.compile=default"]


def test_a_baseline_with_tf32_on_is_noted(tmp_path):
    write_run(tmp_path / "fp32", flags={"cudnn.conv.fp32_precision": "tf32"})
    write_run(tmp_path / "amp", "amp")
    [group], _ = grouped(tmp_path)
    [note] = group.notes
    assert note == "the baseline fp32 did not compute FP32 products in full FP32: cudnn.conv tf32"


def test_the_title_is_the_experiment_and_its_slug_is_unique_and_safe(tmp_path):
    for number, experiment in enumerate(("a b", "a/b", "A-b")):
        more = {"choices": {"experiment": experiment}, "overrides": {"optim.lr": number + 1.0}}
        write_study(tmp_path / str(number), {"fp32": [1.0], "amp": [1.0]}, **more)
    groups, _ = grouped(tmp_path)
    assert [group.title.partition(" optim")[0] for group in groups] == ["a b", "a/b", "A-b"]
    assert [group.slug for group in groups] == ["a-b", "a-b-2", "A-b-3"]


def test_equal_titles_show_three_keys_and_count_the_others():
    def titles(count):
        keys = [{f"optim.k{place}": value for place in range(count)} for value in (1, 2)]
        groups = [ProtoGroup("same", "", Arm("fp32", "fp32", []), [], own) for own in keys]
        name_groups(groups)
        return [group.title for group in groups]

    shown = [f" optim.k0={value} optim.k1={value} optim.k2={value}" for value in (1, 2)]
    assert titles(3) == [f"same{text}" for text in shown]
    assert titles(4) == [f"same{text} and 1 more keys" for text in shown]
    assert titles(5) == [f"same{text} and 2 more keys" for text in shown]


def test_a_slug_has_80_characters_at_most_and_at_least_one():
    groups = [ProtoGroup(t, "", Arm("a", "a", []), []) for t in ("x" * 90, "-/.", "...")]
    name_groups(groups)
    assert [group.slug for group in groups] == ["x" * 80, "group", "group-2"]


def test_a_mode_of_ones_own_is_called_by_its_name_and_another_scaler_named(tmp_path):
    write_study(tmp_path, {"fp32": [1.0], "amp": [1.0]})
    for scaler in ("dynamic", "static"):
        recorded = {"mode": "mine", "scaler": scaler, "usual_scaler": "dynamic"}
        write_run(tmp_path / scaler, "mine", scaler=scaler, precision=recorded)
    [group], _ = grouped(tmp_path)
    assert labels(group) == ["fp32", "amp", "mine", "mine (static)"]


FULL_FP32 = {
    **{f"precision.{key}_dtype": "fp32" for key in ("param", "norm", "master", "grad", "loss")},
    "precision.reduce_dtype": None,
    "precision.matmul": {"input": None},
    "precision.attention": {"format": None},
    "precision.update": {"state_dtype": None, "square_dtype": None},
    "precision.name": "plain",
}


def test_fp32_under_another_name_is_the_baseline_where_there_is_no_other(tmp_path):
    write_run(tmp_path / "plain", "plain", overrides=FULL_FP32)
    write_run(tmp_path / "amp", "amp")
    [group], _ = grouped(tmp_path)
    assert labels(group) == ["plain", "amp"]
    # Its values are those of FP32, but the mode of that name goes first.
    write_run(tmp_path / "fp32")
    write_run(tmp_path / "half", "half")  # most of its values are not recorded
    [group], _ = grouped(tmp_path)
    assert labels(group) == ["fp32", "amp", "half", "plain"]
    [group], _ = group_runs(load_runs([tmp_path])[0], baseline="half")  # whatever it computed in
    assert labels(group)[0] == "half"


PLAIN = flat({"precision": asdict(PrecisionConfig()), "scaler": asdict(ScalerConfig())}) | {
    f"precision.{key}_dtype": "fp32" for key in ("param", "norm", "master", "grad", "loss")
}
# They qualify what FP32 has not. Composition refuses them without it, but for the last two, which
# name layers and products of what is not there.
QUALIFY = {
    "precision.reduce_divide": "before",
    "precision.reduce_order": "ring",
    "precision.update.rounding": "kahan",
    "precision.update.state_rounding": "stochastic",
    "precision.attention.grad_format": "e4m3",
    "precision.attention.granularity": "tensor",
    "precision.matmul.granularity": "row",
    "precision.matmul.weight_granularity": "16x16",
    "precision.matmul.weight": "e4m3",
    "precision.matmul.grad_output": "e5m2",
    "precision.matmul.scale": "pow2",
    "precision.matmul.scale_rounding": "even",
    "precision.matmul.history": 16,
    "precision.matmul.margin": 1,
    "precision.matmul.grad_rounding": "stochastic",
    "precision.matmul.hadamard": ["output"],
    "precision.matmul.dequantized": ["grad_input"],
    "precision.matmul.high_precision": ["output"],
    "precision.matmul.modules": ["fc*"],
}


def may_be_baseline(keys):
    run = made_run(0, 1.0, mode="own", keys=keys, scaler=keys.get("scaler.kind", "none"))
    return cells_of([run])[0].is_baseline


@pytest.mark.parametrize("key", [key for key in PLAIN if key.startswith("precision.")])
def test_what_is_not_all_fp32_is_no_baseline(key):
    """Each key of the schema tells, but those that qualify another one."""
    assert may_be_baseline(PLAIN)
    if key in (*QUALIFY, "precision.name"):
        assert may_be_baseline(PLAIN | {key: QUALIFY.get(key, "mine")})
        return
    for value in ("bf16", "fp16", "tf32", "e4m3", {"fc": "fp16"}, "", "fp32 "):
        assert not may_be_baseline(PLAIN | {key: value})
    assert not may_be_baseline({name: own for name, own in PLAIN.items() if name != key})


def test_a_scaled_loss_is_no_baseline():
    for kind in ("dynamic", "static", "logmax"):
        assert not may_be_baseline(PLAIN | {"scaler.kind": kind})
    # Of an earlier record the scaler's name tells.
    old = {key: value for key, value in PLAIN.items() if key != "scaler.kind"}
    assert may_be_baseline(old)
    [cell] = cells_of([made_run(0, 1.0, mode="own", keys=old, scaler="dynamic")])
    assert not cell.is_baseline


@pytest.mark.slow
@pytest.mark.parametrize("key", [*QUALIFY][:-2])
def test_what_qualifies_a_key_that_fp32_has_not_is_refused(key):
    value = str(QUALIFY[key]).replace("'", "")
    with pytest.raises(BadInput, match=r"precision\."):
        compose_config(["precision=fp32", f"{key}={value}"])


def test_intervals_of_evaluations_may_differ_if_the_last_steps_agree(tmp_path):
    """Runs from before the default changed are the baseline of new ones."""
    write_study(tmp_path, {"fp32": [1.0] * 3})
    for seed in range(3):
        write_run(tmp_path / f"amp-s{seed}", "amp", seed, overrides={"train.eval_every": 20})
    [group], lines = grouped(tmp_path)
    assert group.baseline.mode == "fp32" and [arm.mode for arm in group.arms] == ["amp"]
    assert lines == [] and "train.eval_every" not in group.arms[0].label
