"""Changes to a failing run: which are tried, and that a state survives the move to another mode."""

import shlex
from functools import cache

import pytest
import torch

from mprun.cli import main
from mprun.config.compose import compose_config
from mprun.extensions.diagnosis.commands.explain import command_with
from mprun.extensions.diagnosis.first_nonfinite import Finding
from mprun.extensions.diagnosis.interventions import (
    Origin,
    applied,
    groups_of,
    options_of,
    proposed,
    survive,
    transplant,
)
from mprun.extensions.diagnosis.observation import Event
from mprun.extensions.diagnosis.trials import SETTLED, Tried, judged
from mprun.numerics.replay import Steps
from mprun.precision.packed_states import STATE_FORMATS

from ...helpers import TINY_GPT, assert_same_bits
from ...numerics.failing_runs import GAN, LM

every_option = cache(options_of)


def finding(phase, module="", tensor="output", kind="loss", operation="addmm", **more):
    event = Event(
        0, phase, module, operation, tensor, torch.float16, "infinity", 1, 2, True, 1.0, **more
    )
    return Finding("operation", kind, 3, True, event)


@pytest.mark.parametrize("mode", ["amp", "fp16_naive", "fp8_rowwise", "nvfp4"])
def test_an_option_is_what_is_composed_with_it(mode):
    assert every_option()[f"precision={mode}"] == groups_of(f"precision={mode}")


def tried(*overrides, of):
    config = compose_config(overrides).as_dict()
    return [" ".join(overrides) for overrides in changes(config, of)]


def changes(config, of, **more):
    return applied(config, proposed(config, of, every_option(), **more), every_option())


def test_a_module_s_overflow_in_fp16_master():
    of = finding("forward", "lstm.inner")
    assert tried(*LM, "precision=fp16_master", "optim=sgd_plain", of=of) == [
        "precision.overrides.lstm.inner=fp32",
        "scaler=dynamic",
        "precision.overrides.lstm=fp32",
        "optim.lr=0.1",
        "precision=bf16_master",
        "precision=fp32",
    ]


@pytest.mark.parametrize(
    ("cure", "left"),
    [("scaler=dynamic", "optim.lr=0.1"), ("precision=fp32", "optim.lr=0.1"), ("optim.lr=1", "")],
)
def test_the_command_with_a_cure_composes(cure, left):
    """The run's own settings of a replaced scaler or mode are dropped, too."""
    scaler = ["scaler=static", "scaler.scale=512"]
    own = ["precision=fp16_master_scaled", *scaler, "optim.lr=0.1", "output_dir=x"]
    words = shlex.split(command_with(Tried((cure,), True, ""), {"overrides": own}))
    assert words[0] == "mprun" and words[-1] == cure and "output_dir=x" not in words
    assert not left or left in words
    assert main([*words[1:], "--cfg", "job"]) == 0


def test_a_command_to_copy_has_double_quotes_in_single_ones():
    own = ["precision=mxfp4", "precision.matmul.modules=['*','!output']", r"name=it\'s"]
    line = command_with(Tried(("optim.lr=0.1",), True, ""), {"overrides": own})
    assert line.startswith("""mprun precision=mxfp4 'precision.matmul.modules=["*","!output"]' """)
    assert shlex.split(line)[3:] == [own[2], "optim.lr=0.1"]


def test_the_command_with_a_cure_has_the_user_s_options(tmp_path, capsys):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/mine.yaml").write_text("steps: 7\n")
    cure = Tried(("scaler=dynamic",), True, "")
    words = shlex.split(command_with(cure, {"overrides": ["train=mine"]}, str(tmp_path)))
    assert main([*words[1:], "--cfg", "job"]) == 0
    assert "steps: 7\n" in capsys.readouterr().out


NONE = "precision.matmul.input=null precision.matmul.weight=null "
NONE += "precision.matmul.grad_output=null"


@pytest.mark.slow
def test_products_in_fp8():
    """With a scale, then the mode without FP8."""
    of = finding("forward", "blocks.0.mlp.inputs", operation="scaled_mm")
    found = tried(*TINY_GPT, "precision=fp8_unscaled", of=of)
    assert found == [
        "precision.overrides.blocks.0.mlp.inputs=fp32",
        "precision.matmul.granularity=tensor",
        "precision=bf16_master",
        "precision.overrides.blocks.*.mlp.inputs=fp32",
        "precision.overrides.blocks.0.mlp=fp32",
        "optim.lr=0.0001",
        "precision=fp32",
    ]
    of_rows = tried(*TINY_GPT, "precision=fp8_rowwise", of=of)
    assert of_rows == [one for one in found if "granularity" not in one]
    # Without such a mode its keys, said in words; what is left of them fits together.
    more = "precision.update.state_dtype=bf16"
    for mode in ("fp8_rowwise", "fp8_unscaled", "nvfp4", "mxfp8_floor"):
        asked = [*TINY_GPT, f"precision={mode}", more]
        (cure,) = (one for one in tried(*asked, of=of) if NONE in one)
        changed = compose_config([*asked, *cure.split()]).config
        assert changed.precision.matmul.input is None
        assert Tried(tuple(cure.split()), True, "").change == "linear layers without casts"
    asked = [*TINY_GPT, "precision=fp8_rowwise", "scaler=dynamic"]
    assert any(NONE in one for one in tried(*asked, of=of))  # another scaler is another change
    # Changes of casts come before the end of all casts.
    config = compose_config([*TINY_GPT, "precision=mxfp4"]).as_dict()
    key = "precision.matmul.modules"
    with_casts = [*changes(config, of, casts=[{key: ["*", "!blocks.0.*"]}])]
    assert with_casts[1] == (f'{key}=["*","!blocks.0.*"]',)
    assert with_casts[2] == ("precision=bf16_master",)


@pytest.mark.parametrize("mode", ["bf16_stochastic", "bf16_kahan"])
def test_weights_that_are_updated_in_fp32_need_no_masters(mode):
    found = tried(*TINY_GPT, f"precision={mode}", of=finding("update", operation="_fused_adamw_"))
    assert not any("master_dtype" in one or "grad_dtype" in one for one in found)
    naive = tried(*TINY_GPT, "precision=bf16_naive", of=finding("update"))
    assert "precision.master_dtype=fp32 precision.grad_dtype=fp32" in naive


def test_a_trial_draws_the_random_bits_of_the_run(build_run):
    run = [*TINY_GPT, "precision=bf16_stochastic"]
    one, other = build_run(*run), build_run(*run, "optim.lr=1e-4")
    for step in range(2):
        one.task.train_step(step)
    transplant(other, one.task.state_dict())
    assert other.task.learner.steps.narrow.updates == 2


def test_what_the_model_computes_itself_has_an_override():
    found = tried(*LM, "precision=fp16_master", "optim=sgd_plain", of=finding("forward", ""))
    assert found[0] == "precision.overrides.forward=fp32"


def test_an_update_in_fp16_without_masters():
    state = "exp_avg of output.bias"
    of = finding("update", tensor=state, operation="_foreach_addcdiv_", at_zero=True)
    assert tried(*LM, "precision=fp16_naive", "optim=adam", of=of) == [
        "precision.overrides.output=fp32",
        "precision.norm_dtype=fp32",
        "scaler=static scaler.scale=1024",
        "scaler=dynamic",
        "optim.eps=1e-06",
        "optim.eps=0.0001",
        "precision.master_dtype=fp32 precision.grad_dtype=fp32",
        "optim.lr=0.0001",
        "optim.lr=1e-05",
        "optim.lr=1e-06",
        "precision=bf16_naive",
        "precision=fp32",
    ]


def test_scales_below_a_static_one_come_from_what_the_gradient_would_be():
    # 2^20 is 2^4 times FP16's end; one power to spare: 2^-5, then 2^-9.
    scaled = ["precision=fp16_master_scaled", "scaler=static", "scaler.scale=1024"]
    of = finding("backward", "loss", "gradient", would_be=2.0**20)
    found = tried(*LM, *scaled, "optim=sgd_plain", of=of)
    assert found[:2] == ["scaler.scale=16", "scaler.scale=1"]
    unscaled = tried(*LM, "precision=fp16_master", "optim=sgd_plain", of=of)
    static = "scaler=static scaler.scale="
    assert unscaled[:2] == [f"{static}0.015625", f"{static}0.0009765625"]


def test_a_floor_is_lowered_only_where_the_scale_collapsed_on_it():
    scaled = [*LM, "precision=fp16_master_scaled", "scaler.min_scale=1", "optim=sgd_plain"]
    lower = "scaler.min_scale=0.000244140625"  # 2^-12
    of = finding("backward", "lstm", "gradient")
    assert lower not in tried(*scaled, of=of)
    of.kind = "collapse"
    assert lower in tried(*scaled, of=of)


def test_fp32_has_no_precision_to_change():
    of = finding("forward", "lstm")
    assert tried(*LM, "precision=fp32", "optim=sgd_plain", of=of) == ["optim.lr=0.1"]


def test_overrides_in_a_gan_leave_the_network_s_name_out():
    of = finding("forward", "generator.layers.conv1")
    found = tried(*GAN, "precision=amp", of=of)
    assert found[0] == "precision.overrides.layers.conv1=fp32"


def trained(build_run, steps, *overrides):
    built = build_run(*overrides)
    replay = Steps(built, 0, 0)
    for _ in range(steps):
        replay.advance()
    return built


def kept(built):
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf,
        built.task.state_dict(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "amp", "bf16_master", "fp16_naive", "fp16_master_scaled"])
def test_a_state_moved_to_another_mode_trains_on(build_run, mode):
    common = [*LM, "optim=sgd"]
    old = trained(build_run, 3, *common, "precision=fp16_master")
    state, new = kept(old), build_run(*common, f"precision={mode}")
    transplant(new, state)
    learner, own = new.task.learners["model"], state["learner"]
    for name, weight in learner.named.items():
        assert torch.equal(weight, own["model"][name].to(weight.dtype)), name
        mine = learner.optimizer.state[weight]["momentum_buffer"]
        assert torch.equal(mine, own["state"][name]["momentum_buffer"].to(mine.dtype)), name
    mine, theirs = (float(Steps(built, 3, 0).advance().loss) for built in (new, old))
    # One step of a tiny model: BF16's 8 bits move a loss of 4 by less than a hundredth.
    assert mine == pytest.approx(theirs, abs=0.02)


@pytest.mark.few(1)
@pytest.mark.parametrize("to", ["null", "bf16", "fp8"])
def test_state_in_blocks_is_moved_as_numbers(build_run, to):
    key = "precision.update.state_dtype"
    old = trained(build_run, 2, *TINY_GPT, "model.hidden_size=64", f"{key}=dynamic8")
    new = build_run(*TINY_GPT, "model.hidden_size=64", f"{key}={to}")
    transplant(new, kept(old))
    one, other = (built.task.learner.steps for built in (old, new))
    theirs, mine = (steps.named()["embedding.weight"] for steps in (one, other))
    assert "exp_avg.scale" in one.optimizer.state[theirs]
    found, wide = other.optimizer.state[mine]["exp_avg"], one.narrow.widened(theirs)["exp_avg"]
    if to == "fp8":
        found, wide = other.narrow.widened(mine)["exp_avg"], in_fp8(wide)
    assert torch.equal(found, wide.to(found.dtype))


def in_fp8(wide):
    packing = STATE_FORMATS["fp8"](wide.device)
    return packing.decode("exp_avg", packing.encode("exp_avg", wide))


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["precision.update.state_dtype=dynamic8"]])
def test_a_state_moved_to_its_own_mode_is_the_state(build_run, more):
    arguments = [*GAN, "precision=amp", "scaler.growth_interval=2", *more]
    old = trained(build_run, 3, *arguments)
    new = build_run(*arguments)
    transplant(new, kept(old))
    assert_same_bits(new.task.state_dict(), old.task.state_dict())


def six_steps(built, origin):
    course = survive(Steps(built, 0, 0), origin, after=5)
    assert len(course.losses) == 6 or course.skipped
    return judged(course, origin.limit, SETTLED)


@pytest.mark.slow
def test_a_static_scale_that_skips_is_no_cure(build_run):
    # 2^24 / 24 overflows in every step; 2^10 / 24 in none.
    static = [*LM, "precision=fp16_master_scaled", "optim=sgd_plain", "scaler=static"]
    origin = Origin({}, bad_step=1)
    cures, result, _ = six_steps(build_run(*static, f"scaler.scale={2**24}"), origin)
    assert not cures and "skipped" in result
    cures, result, _ = six_steps(build_run(*static, "scaler.scale=1024"), origin)
    assert cures and result.startswith("finite up to step 6; loss ")


def test_a_loss_that_stays_large_is_no_cure(build_run):
    built = build_run(*LM, "precision=fp32", "optim=sgd_plain")
    cures, result, _ = six_steps(built, Origin({}, bad_step=1, limit=3.0))
    assert not cures and result.startswith("finite, but the loss is 3.")  # log(48) = 3.87
