"""compare.metric, compare.margin, compare.window: what is filled in, and what is refused."""

import pytest

from mprun.config.compose import compose_config
from mprun.config.keys import role_of
from mprun.errors import BadInput
from mprun.record.keys import config_hash

from ..helpers import raises_line


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("overrides", "margin"),
    [
        (["model=lstm_lm"], 0.01),
        (["model=lstm_lm", "compare.metric=perplexity"], 0.01),
        (["model=conv_autoencoder"], 0.01),
        (["model=dcgan", "compare.metric=g_loss"], 0.01),
        (["model=dcgan", "compare.metric=sliced_wasserstein"], 0.1),
        (["model=resnet50", "compare.metric=top1"], 1.0),  # digits: 360 images
        (["model=resnet50", "data=synthetic_images", "compare.metric=top1"], 0.5),
        (["model=alexnet", "compare.metric=top5"], 1.0),
        (["model=resnet50", "compare.metric=top1", "compare.margin=0.3"], 0.3),
        (["experiment=quickstart_underflow"], 0.01),
        (["experiment=quickstart_lost_updates"], 0.01),
    ],
)
def test_the_record_holds_the_number(overrides, margin):
    composed = compose_config(overrides)
    assert composed.as_dict()["compare"]["margin"] == margin
    assert composed.config.compare.window == 1


def test_a_default_that_is_spelled_out_is_the_same_run():
    def hashed(*more):
        given = ["model=resnet50", "compare.metric=top1", *more]
        return config_hash(compose_config(given).as_dict())

    assert hashed() == hashed("compare.margin=null") == hashed("compare.margin=1")
    assert hashed() != hashed("compare.margin=2")


def test_the_baseline_is_a_mode_and_fp32_goes_without_saying():
    record = compose_config(["model=lstm_lm"]).as_dict()
    assert record["compare"]["baseline"] == "fp32"
    assert role_of("compare.baseline") == role_of("compare.margin")
    other = compose_config(["model=lstm_lm", "compare.baseline=amp_bf16"]).as_dict()
    assert config_hash(other) != config_hash(record)


def test_a_mode_of_ones_own_may_be_the_baseline(tmp_path):
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "mine.yaml").write_text("defaults: [amp_bf16]\n")
    config = compose_config(["compare.baseline=mine"], str(tmp_path)).config
    assert config.compare.baseline == "mine"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("compare.margin=-1", "compare.margin=-1.0|> 0"),
        ("compare.margin=0", "compare.margin=0.0|> 0"),
        ("compare.metric=top1", "compare.metric=top1|perplexity"),
        ("compare.margin=inf", "compare.margin=inf|finite"),
        ("compare.baseline=bf16", "compare.baseline=bf16|did you mean|amp_bf16"),
        ("compare.window=0", "compare.window=0|>= 1"),
        ("compare.window=2 train.eval_every=0", "compare.window=2|train.eval_every=0|1 to 1"),
        ("compare.window=4 train.steps=5 train.eval_every=2", "compare.window=4|1 to 3"),
        ("model=dcgan compare.metric=top1", "compare.metric=top1|sliced_wasserstein"),
        ("model=resnet50 compare.metric=sliced_wasserstein", "sliced_wasserstein|top5"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(overrides, words):
    with raises_line(BadInput, *words.split("|")):
        compose_config(overrides.split())


def test_a_window_that_the_run_has():
    # Steps 2, 4 and the last one, 5.
    config = compose_config(["compare.window=3", "train.steps=5", "train.eval_every=2"]).config
    assert config.compare.window == 3
    # With epochs the number of steps is known only when the data are.
    assert compose_config(["compare.window=3", "train.epochs=2"]).config.compare.window == 3


@pytest.mark.parametrize("model", ["lstm_lm", "resnet50", "gpt", "dcgan", "conv_autoencoder"])
def test_a_default_run_evaluates_five_times(model):
    """Else its curves have one point."""
    train = compose_config([f"model={model}"]).config.train
    assert train.eval_every is None and 5 * train.evaluates_every(train.steps) == train.steps
    # At any length, however many samples are held out.
    assert train.evaluates_every(450_000) == 90_000 and train.evaluates_every(1) == 1


@pytest.mark.slow
def test_rows_of_the_paper_evaluate_as_they_were_measured():
    for network in ("alexnet", "vgg", "googlenet", "inception_v2", "inception_v3", "resnet50"):
        assert compose_config([f"experiment=paper_{network}"]).config.train.eval_every == 0
