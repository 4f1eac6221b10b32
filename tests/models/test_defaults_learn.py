"""`mprun model=X` alone: every model has visibly learned when its default length is over."""

import subprocess
import sys

import pytest
import torch

from mprun.config.compose import compose_config
from mprun.config.option_files import option_files
from mprun.record.metrics import read_metrics
from mprun.tasks.sample_distance import SampleDistance

from ..helpers import configured
from ..tables import with_extensions

# Top-1 in per cent at the end, above it; chance is 10. docs/running.md has what was measured.
CLASSIFIERS = {"resnet50": 90.0, "alexnet": 85.0, "alexnet_2012": 50.0}
CLASSIFIERS |= {"resnet50_preact": 90.0, "vgg16": 50.0, "googlenet": 50.0}
CLASSIFIERS |= {"inception_v2": 85.0, "inception_v3": 50.0}
# The final evaluation's loss over that of the first step, which comes before any update; below it.
LOSSES = {
    "lstm_lm": 0.8,
    "lstm_lm_projected": 0.9,
    "lstm_lm_medium": 0.9,
    "lstm_lm_large": 0.9,
    "biglstm": 0.9,
    "gpt": 0.6,
    "gpt_llama": 0.6,
    "gpt_moe": 0.6,
    "gpt2": 0.9,
    "conv_autoencoder": 0.8,
}
LOSSES = with_extensions("LOSSES", LOSSES)
MODELS = [*CLASSIFIERS, *LOSSES, "dcgan"]


def test_every_model_but_your_own_is_asked_what_it_learns():
    assert sorted([*MODELS, "custom"]) == sorted(option_files("model"))


def trained(folder, *overrides):
    """The records of a run as a user starts it."""
    command = [sys.executable, "-m", "mprun", "device=cpu", "seed=1", f"output_dir='{folder}'"]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return read_metrics(folder / "metrics.jsonl")


# Minutes each: FP32 in one of each kind of data, the mode with a cast in each layer in all.
IN_FP32 = ["alexnet", "lstm_lm", "gpt", "conv_autoencoder", "ssd_mini", "deep_speech2", "seq2seq"]
CASES = [(model, "amp") for model in [*CLASSIFIERS, *LOSSES]]


@pytest.mark.long
@pytest.mark.parametrize(("model", "precision"), [*CASES, *((one, "fp32") for one in IN_FP32)])
def test_a_model_alone_learns(model, precision, tmp_path):
    records = trained(tmp_path / "run", f"model={model}", f"precision={precision}")
    first, last = records[0], records[-1]
    assert (first["split"], first["step"], last["split"]) == ("train", 1, "eval")
    if model in CLASSIFIERS:
        assert last["top1"] > CLASSIFIERS[model]
    else:
        assert last["loss"] < LOSSES[model] * first["loss"]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_dcgan_s_samples_come_closer_to_the_data_than_noise(precision, tmp_path):
    command = ["model=dcgan", f"precision={precision}", "compare.metric=sliced_wasserstein"]
    begun = trained(tmp_path / "begun", *command, "train.steps=1")[-1]["sliced_wasserstein"]
    ended = trained(tmp_path / "ended", *command)[-1]["sliced_wasserstein"]
    data = compose_config(["model=dcgan"]).config.data
    own = {"image_size": data.image_size, "value_range": data.value_range, "batch_size": 360}
    (real, _), *_ = configured("digits", seed=0, device="cpu", **own).eval_batches()
    noise = torch.rand(real.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    of_noise = SampleDistance(data.image_size, 3, "cpu")([real], [noise])
    assert ended < 0.6 * begun and ended < of_noise / 4
