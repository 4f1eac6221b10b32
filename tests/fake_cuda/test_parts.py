"""A run on CUDA beside its plain steps: updates, scalers, what is saved, probed and refused."""

import json

import pytest

from mprun.config.option_files import option_files

from .cells import MODELS, STEPS, refusal
from .conftest import assert_sound
from .test_every_mode import LARGE

SMALL = [*MODELS["conv_autoencoder"], f"train.steps={STEPS}"]
STACKED = [*MODELS["lstm_lm, 2 layers, dropout"], f"train.steps={STEPS}"]
# With what "auto" takes.
RMSPROP = {"rmsprop": {"auto": "foreach", "foreach": "foreach", "loop": "loop"}}
RMSPROP["rmsprop_tensorflow"] = {"auto": "loop", "loop": "loop"}
PATHS = ("auto", "fused", "foreach", "loop")


@pytest.mark.parametrize("mode", ["fp16_master_scaled", "fp32", "amp"])
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad", "adamw", *RMSPROP])
@pytest.mark.few(1)
def test_every_update(device, tmp_path, optimizer, implementation, mode):
    overrides = [f"optim={optimizer}", f"optim.implementation={implementation}"]
    found = device.run(tmp_path / "run", [*SMALL, *overrides, f"precision={mode}"])
    if device.lacks_fused_adagrad and optimizer == "adagrad" and implementation == "fused":
        assert "optim.implementation=fused: torch" in found["error"]
        return
    if optimizer in RMSPROP and implementation not in RMSPROP[optimizer]:
        assert f"optim.implementation={implementation}: " in found["error"]
        return
    assert_sound(found)
    [update] = found["record"]["precision"]["update"].values()
    expected = RMSPROP.get(optimizer, {"auto": "fused"}).get(implementation, implementation)
    if device.lacks_fused_adagrad and optimizer == "adagrad" and expected == "fused":
        expected = "foreach"
    assert update["path"] == expected
    assert found["record"]["execution"]["cuda_graph"] == "on"


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["on", "off"])
def test_a_varying_rate_needs_no_fused_adam(device, tmp_path, execution):
    """A naive mode updates operation by operation, and no step waits for the skipped updates."""
    overrides = ["optim=adamw", "optim.schedule=cosine", "precision=bf16_naive", "scaler=dynamic"]
    overrides.append(f"train.cuda_graph={execution}")
    record = device.record(tmp_path / "run", [*SMALL, *overrides])
    assert record["precision"]["update"]["model"]["path"] == "foreach"


def test_a_varying_rate_that_only_the_host_can_read_is_refused_before_a_run(device, tmp_path):
    overrides = ["optim=sgd", "optim.schedule=cosine", "precision=bf16_naive", "scaler=dynamic"]
    found = device.run(tmp_path / "run", [*SMALL, *overrides])
    says = "without a fused kernel, optimizer SGD reads its learning rate on the host"
    assert f"optim.schedule: {says}" in found["error"]
    assert not (tmp_path / "run").exists()


# In the default run: the first and the last of both.
SCALERS = sorted(option_files("scaler"), key="logmax".__eq__)
HALVES = ("fp16_naive", "fp16_master", "amp", "bf16_master", "amp_bf16", "bf16_naive")


@pytest.mark.slow
@pytest.mark.parametrize(("scaler", "mode"), [(s, mode) for s in SCALERS for mode in HALVES])
def test_every_scaler_in_every_16_bit_dtype(device, tmp_path, scaler, mode):
    overrides = ["optim=sgd", "optim.momentum=0.9", f"scaler={scaler}", f"precision={mode}"]
    assert device.record(tmp_path / "run", [*SMALL, *overrides])["execution"]["cuda_graph"] == "on"


SETTINGS = (
    "train.accumulate=2 precision.reduce_dtype=fp16 precision.reduce_divide=before",
    "train.accumulate=4 precision.reduce_dtype=bf16 precision.reduce_divide=split "
    "precision.reduce_order=ring",
    "train.accumulate=3 precision=fp16_naive optim=sgd optim.momentum=0.9",
    "train.accumulate=2 precision=fp32 precision.reduce_dtype=fp16",
    "train.clip_norm=0.25",
    "optim.schedule=linear",
    "optim.average_decay=0.99",
    "train.channels_last=off",
    "precision.overrides.encoder=fp32",
)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.slow
def test_other_settings(device, tmp_path, setting):
    mode = [] if "precision=" in setting else ["precision=fp16_master_scaled"]
    record = device.record(tmp_path / "run", [*SMALL, *mode, *setting.split()])
    assert record["execution"]["cuda_graph"] == "on"


@pytest.mark.slow
def test_a_gan_with_two_loss_scales(device, tmp_path):
    overrides = [*MODELS["dcgan"], f"train.steps={STEPS}", "precision=amp", "scaler.per=optimizer"]
    device.record(tmp_path / "run", overrides)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["amp", "amp_bf16", "fp32", "fp16_naive", "bf16_master"])
@pytest.mark.parametrize("model", ["lstm_lm, 2 layers, dropout", "dcgan"])
def test_evaluation_in_the_modes_own_arithmetic(device, tmp_path, model, mode):
    overrides = [*MODELS[model], f"precision={mode}", "train.eval_arithmetic=mode"]
    device.record(tmp_path / "run", [*overrides, "train.steps=4"])


@pytest.mark.parametrize("graph", ["on", "off"])
@pytest.mark.parametrize("mode", ["amp", "bf16_master", "amp_bf16", "fp32"])
@pytest.mark.slow
def test_resume_of_a_stacked_lstm_with_dropout(device, tmp_path, mode, graph):
    """Its masks come from a state inside of cuDNN, which goes into checkpoints."""
    folder = tmp_path / "run"
    overrides = [*STACKED, f"precision={mode}", f"train.cuda_graph={graph}"]
    device.record(folder, [*overrides, "train.checkpoint_every=6"])
    found = device.command(f"resume={folder}", "train.steps=24")
    assert found["warnings"] == [] and found["counts"]["stray"] == 0
    record = json.loads((folder / "run.json").read_text())
    assert record["last_step"] == 24 and record["attempts"] == 2
    assert (record["execution"]["cuda_graph"] == "on") == (graph == "on")


NARROW = ("bf16_kahan", "fp8_tensorwise", "bf16_naive", "bf16_stochastic")
PROBED = [(model, mode) for mode in ("fp16_master_scaled", "amp_bf16")
          for model in ("conv_autoencoder", "lstm_lm, 2 layers, dropout", "dcgan")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mode"), [*PROBED, *(("gpt", mode) for mode in NARROW)])
def test_probes_and_shadow_steps(device, tmp_path, model, mode):
    """Probes read the device where they are due; the steps between them wait for nothing."""
    overrides = [*MODELS[model], f"precision={mode}", "train.steps=7", "numerics=probes"]
    overrides += ["numerics.every=3", "numerics.shadow_every=2"]
    device.record(tmp_path / "run", overrides)
    # The counts are old memory, at times below 0: `read_probes` would refuse them.
    content = (tmp_path / "run" / "numerics" / "step-00000006.json").read_text()
    if mode in NARROW:  # what 16-bit weights took of their updates, inputs of linear layers
        own = json.loads(content)["learners"]["model"]
        assert own["tensors"]["inputs"] and bool(own["applied_updates"]) == mode.startswith("bf16")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp16_master_scaled", "fp32"])
@pytest.mark.parametrize(
    "model", [*(m for m in MODELS if m not in LARGE), "alexnet at 224 px", "resnet50"]
)
def test_deterministic(device, tmp_path, model, mode):
    overrides = MODELS.get(model) or [*MODELS["alexnet"], "data=digits_224"]
    overrides = [*overrides, "deterministic=true", f"precision={mode}", "train.steps=10"]
    record = device.record(tmp_path / "run", [*overrides, "train.checkpoint_every=0"])
    assert (record["execution"]["cuda_graph"] == "on") == (refusal(model, mode, "on") is None)


@pytest.mark.slow
def test_what_has_no_deterministic_kernel_is_refused_before_anything_is_written(device, tmp_path):
    overrides = [*MODELS["alexnet"], "deterministic=true"]  # its pooling, at 64 px
    found = device.run(tmp_path / "run", overrides)
    assert found["error"] == (
        "BadInput: deterministic=true: adaptive_avg_pool2d_backward_cuda does not have a "
        "deterministic implementation"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_peak_with_a_graph_is_that_of_its_tensors(device, tmp_path):
    """Evaluations reset the peak, and replays allocate nothing."""
    peaks = {}
    for graph in ("off", "on"):
        overrides = [*SMALL, f"train.cuda_graph={graph}", "train.eval_every=6", "train.steps=24"]
        peaks[graph] = device.record(tmp_path / graph, overrides)["memory"]
    assert peaks["on"]["peak_bytes"] >= peaks["off"]["peak_bytes"]
    assert all(peak["reserved_bytes"] >= peak["peak_bytes"] > 0 for peak in peaks.values())


OWN = '''
from torch import nn


class Own(nn.Module):
    """Convolution, norms, attention, and a recurrent layer of torch's with dropout."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 4, stride=4), nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.inner = nn.LayerNorm(8)
        self.gru = nn.GRU(8, 8, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(16, 10)

    def forward(self, images):
        x = self.norm(self.conv(images)).relu().flatten(2).transpose(1, 2)
        x = self.inner(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(self.gru(x)[0].mean(1))


def network(data):
    return Own()
'''


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["on", "off"])
@pytest.mark.parametrize("mode", ["fp16_naive", "amp", "amp_bf16", "fp32", "bf16_master"])
def test_a_model_of_ones_own(device, tmp_path, mode, graph):
    (tmp_path / "own_model.py").write_text(OWN)
    overrides = ["model=custom", "model.factory=own_model:network", "data=digits_32"]
    overrides += ["data.batch_size=4", "optim=sgd", f"precision={mode}", "train.steps=10"]
    overrides.append(f"train.cuda_graph={graph}")
    record = device.record(tmp_path / "run", overrides, path=str(tmp_path))
    assert (record["execution"]["cuda_graph"] == "on") == (graph == "on")


@pytest.mark.slow
def test_the_targets_of_detection_are_found_without_a_wait(device, tmp_path):
    """A number written to places that are tensors is a copy that torch 2.11 waits for."""
    device.record(tmp_path / "run", [*MODELS["ssd_mini"], "train.steps=3"])


@pytest.mark.slow
def test_micro_batches_that_draw_are_not_captured(device, tmp_path):
    """Each has a seed of its own, a captured step one for all."""
    dropout = [*MODELS["seq2seq"], "train.steps=4", "train.accumulate=2"]
    record = device.record(tmp_path / "drawn", [*dropout, "train.cuda_graph=auto"])
    assert "each micro-batch draws" in record["execution"]["cuda_graph"]
    none = [*SMALL, "train.accumulate=2", "train.cuda_graph=on"]
    assert device.record(tmp_path / "plain", none)["execution"]["cuda_graph"] == "on"
    refused = device.run(tmp_path / "refused", [*dropout, "train.cuda_graph=on"])
    assert "train.cuda_graph=on: each micro-batch draws" in refused["error"]
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["bf16_master fp32", "fp32 nvfp4", "fp16_master_scaled amp"])
def test_a_graph_is_captured_anew_after_a_switch_of_modes(device, tmp_path, pair):
    before, after = pair.split()
    own = [f"precision={before}", f"precision.switch=[{{at: 8, to: {after}}}]"]
    own += ["train.steps=16", "train.cuda_graph=on"]
    record = device.record(tmp_path / "run", [*MODELS["gpt"], *own])
    assert record["switched"] == {"9": after}
    execution = record["execution"]
    # Of the eight steps in the second mode the first ones are eager, as at the start of a run.
    assert execution["cuda_graph"] == "on" and 0 < execution["replayed"] < 8
