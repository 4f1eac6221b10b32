"""A comparison needs a run's configuration, the first steps, and the step of its divergence."""

import math
import shutil

import pytest
import torch
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mprun.cli import main
from mprun.config.compose import compose_config
from mprun.record.keys import config_hash
from mprun.record.metrics import write_sample_grid
from mprun.recording.records import EARLY_STEPS

from ..helpers import TINY_AUTOENCODER, TINY_GAN, TINY_LM, record_of, rows_of, run, seal_again

GAN = [*TINY_GAN, "train.steps=6", "train.eval_every=2"]
AMP = [*TINY_LM, "train.steps=4", "train.checkpoint_every=4", "precision=amp"]
AMP += ["scaler.init_scale=64"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished") / "run"
    assert run(directory, *AMP) == 0
    return directory


def config_of(directory) -> dict:
    return yaml.safe_load((directory / "config.yaml").read_text())


@pytest.mark.slow
def test_run_json_holds_the_configuration_of_config_yaml_also_after_a_resume(finished, tmp_path):
    record = record_of(finished)
    assert record["config"] == compose_config([*AMP, f"output_dir='{finished}'"]).as_dict()
    assert record["config"] == config_of(finished)
    compared = {"metric": "loss", "margin": 0.01, "window": 1, "baseline": "fp32"}
    others = ("higher_is_better", "plan", "pair_sd", "pair_sd_source")
    assert record["config"]["compare"] == compared | dict.fromkeys(others)
    directory = shutil.copytree(finished, tmp_path / "run")
    assert main([f"resume={directory}", "train.steps=5", "train.log_every=7"]) == 0
    record = record_of(directory)
    train = record["config"]["train"]
    assert (train["steps"], train["log_every"]) == (5, 7)
    assert record["config"] == config_of(directory)
    assert record["config_hash"] == config_hash(record["config"])


@pytest.mark.slow
def test_a_record_from_before_a_setting_gets_the_setting_when_it_is_resumed(finished, tmp_path):
    directory = shutil.copytree(finished, tmp_path / "run")
    plain = config_of(directory)
    del plain["compare"]["window"]
    (directory / "config.yaml").write_text(yaml.safe_dump(plain))
    seal_again(directory, config=plain, config_hash=config_hash(plain))
    assert main([f"resume={directory}", "train.steps=5"]) == 0
    record = record_of(directory)
    assert record["config"]["compare"]["window"] == 1
    assert record["config"] == config_of(directory)
    assert record["config_hash"] == config_hash(record["config"])


@pytest.mark.slow
def test_the_first_twenty_steps_are_recorded_whatever_log_every_says(tmp_path):
    few, every = tmp_path / "few", tmp_path / "every"
    # Overflows at first, so that skipped updates lie among the first steps; none is evaluated,
    # which flushes, too.
    scaled = [*TINY_LM, "precision=amp", "scaler.init_scale=16777216", "train.steps=30"]
    assert run(few, *scaled, "train.log_every=25") == 0
    assert run(every, *scaled, "train.log_every=1") == 0
    records, all_records = rows_of(few, "train"), rows_of(every, "train")
    assert EARLY_STEPS == 20
    assert [r["step"] for r in records] == [*range(1, 21), 25, 30]
    assert records[0]["skipped"] == 1
    shown = {r["step"]: r for r in all_records}
    for record in records:
        same = ("step", "updates", "skipped", "epoch", "loss", "loss_scale", "lr")
        assert [record[key] for key in same] == [shown[record["step"]][key] for key in same]
    # What costs a look at the clock or a norm is measured at log steps only, as before.
    full = [r["step"] for r in records if "samples_per_s" in r]
    assert full == [r["step"] for r in records if "grad_norm" in r] == [25, 30]
    # Two windows of the throughput, of which the first is left out: one flush per log step.
    assert record_of(few)["throughput"]["windows"] == 1
    view = EventAccumulator(str(few), size_guidance={"scalars": 0})
    view.Reload()
    assert [p.step for p in view.Scalars("train/loss")] == [r["step"] for r in records]


@pytest.mark.slow
def test_the_first_steps_are_whole_after_a_resume_among_them(tmp_path):
    directory = tmp_path / "run"
    common = [*TINY_LM, "train.log_every=9", "train.checkpoint_every=4"]
    assert run(directory, *common, "train.steps=12") == 0
    shutil.rmtree(directory / "checkpoints" / "step-00000012")
    assert main([f"resume={directory}", "train.steps=23"]) == 0
    steps = [r["step"] for r in rows_of(directory, "train")]
    assert steps == [*range(1, 21), 23]


@pytest.mark.slow
def test_a_run_that_dies_before_its_first_log_line_says_where(tmp_path):
    """Adam's eps is 0 in FP16: NaN in the second loss."""
    directory = tmp_path / "run"
    overrides = [*TINY_AUTOENCODER, "precision=fp16_naive", "train.steps=30"]
    assert run(directory, *overrides, "train.log_every=1000") == 3
    first, second = rows_of(directory, "train")
    assert (first["step"], second["step"], record_of(directory)["last_step"]) == (1, 2, 2)
    assert math.isfinite(first["loss"]) and not math.isfinite(second["loss"])


@pytest.mark.slow
def test_a_late_death_between_two_log_lines_has_a_record(tmp_path):
    """Weight decay beyond stability: weights grow by a factor of 4 a step, until FP32 ends."""
    overrides = ["optim=sgd_plain", "optim.lr=1", "optim.weight_decay=5", "train.clip_norm=null"]
    rare, often = tmp_path / "rare", tmp_path / "often"
    for directory, every in ((rare, 1000), (often, 1)):
        steps = ["train.steps=99", f"train.log_every={every}"]
        assert run(directory, *TINY_LM, *overrides, *steps) == 3
    # When depends on the processor. A kernel that rounds a product of two such weights before it
    # adds ends near 4^32, one that does not near 4^64, which is 2^128.
    bad = [r["step"] for r in rows_of(often, "train") if not math.isfinite(r["loss"])]
    died = record_of(rare)["last_step"]
    assert EARLY_STEPS + 1 < died < 75 and bad == [died]
    records = rows_of(rare, "train")
    assert [r["step"] for r in records] == [*range(1, 21), died]
    assert not math.isfinite(records[-1]["loss"])
    assert record_of(rare)["status"] == "diverged"


@pytest.fixture(scope="module")
def gan(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gan") / "run"
    assert run(directory, *GAN, "train.checkpoint_every=3") == 0
    return directory


def grids(directory) -> list[str]:
    return sorted(path.name for path in (directory / "samples").iterdir())


@pytest.mark.slow
def test_each_evaluation_of_a_gan_leaves_a_grid(gan):
    assert grids(gan) == [f"step-{step:08}.png" for step in (2, 4, 6)]
    with Image.open(gan / "samples" / "step-00000006.png") as image:
        # 8 by 8 images of 32 px with borders of 2 px between and around them.
        assert image.size == (8 * 34 + 2, 8 * 34 + 2) and image.mode == "RGB"
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    view = EventAccumulator(str(gan))
    view.Reload()
    shown = view.Images("eval/samples")
    assert [image.step for image in shown] == [2, 4, 6]
    (gan / "shown.png").write_bytes(shown[-1].encoded_image_string)
    with Image.open(gan / "shown.png") as image:
        same = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    (gan / "shown.png").unlink()
    # TensorBoard cuts off what the file rounds: at most one step of 256.
    assert (pixels.int() - same.int()).abs().max() <= 1
    assert pixels.float().std() > 1


@pytest.mark.slow
def test_a_resumed_gan_has_no_grid_from_a_future_that_was_not(gan, tmp_path):
    directory = shutil.copytree(gan, tmp_path / "run")
    shutil.rmtree(directory / "checkpoints" / "step-00000006")
    kept = (directory / "samples" / "step-00000004.png").read_bytes()
    assert main([f"resume={directory}", "train.steps=5"]) == 0
    assert grids(directory) == [f"step-{step:08}.png" for step in (2, 4, 5)]
    # Made again from step 3 on, bit for bit.
    assert (directory / "samples" / "step-00000004.png").read_bytes() == kept


def test_what_a_run_has_at_its_checkpoint_is_neither_made_again_nor_lost(gan, tmp_path):
    directory = shutil.copytree(gan, tmp_path / "run")
    assert main([f"resume={directory}", "train.steps=7"]) == 0
    assert grids(directory) == [f"step-{step:08}.png" for step in (2, 4, 6, 7)]
    assert [row["step"] for row in rows_of(directory, "eval")] == [2, 4, 6, 7]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_is_rounded_and_whole(tmp_path, channels):
    images = torch.tensor([0, 127.4 / 255, 127.6 / 255]).view(3, 1, 1, 1).repeat(1, channels, 4, 4)
    write_sample_grid(tmp_path, 7, images)
    path = tmp_path / "samples" / "step-00000007.png"
    assert grids(tmp_path) == [path.name]
    with Image.open(path) as image:
        values = [image.getpixel((4 + 6 * index, 4)) for index in range(3)]
    assert values == [(0, 0, 0), (127, 127, 127), (128, 128, 128)]


def test_samples_that_are_not_finite_are_black(build_run):
    task = build_run(*GAN).task
    assert task.samples().std() > 0
    with torch.no_grad():
        next(iter(task.g.model.parameters())).fill_(float("nan"))
    assert torch.equal(task.samples(), torch.zeros(64, 3, 32, 32))
