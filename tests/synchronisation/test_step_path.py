"""A training step, and what the loop does between two steps, never reads a value on the host.

Every task trains on tensors that have no values (`without_values`): whatever would need one on the
host, and whatever would copy between host and device, raises. That is Python's part, seen with any
build of torch and in the first step too; autograd, autocast, the single pass and cuDNN's layers are
not what they are on CUDA. Every model in every mode, on these, is in tests/fake_cuda.
"""

import pytest
import torch

import mprun.build.run as build_run_module
from mprun.build import build
from mprun.config.compose import compose_config
from mprun.numerics import failure
from mprun.numerics.failure import FailureKeeper
from mprun.record.async_copy import Moment, PinnedRing, Sent
from mprun.training.metric_buffer import MetricBuffer

from .without_values import (
    CPU,
    GPU,
    HostRead,
    OnGpu,
    WithoutValues,
    on_gpu,
    on_the_host,
    steps,
    without_values,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_on_cuda.py is the real one")

TOKENS = "data=synthetic_tokens data.vocab_size=50 data.batch_size=4 data.sequence_length=4"
TINY = "model.embedding_size=8 model.hidden_size=8 data.train_tokens=512"
IMAGES = "data=synthetic_images data.image_size=32 data.channels=1 data.value_range=tanh"
SOME = "data.batch_size=4 data.train_size=32 data.eval_size=8"
MODELS = {
    "lstm_lm": f"model=lstm_lm {TOKENS} {TINY} model.num_layers=1",
    "sampled": f"model=biglstm {TOKENS} {TINY} model.projection_size=4 model.sampled_softmax=12",
    "gpt": f"model=gpt_llama {TOKENS} model.hidden_size=16 model.qk_norm=true",
    "seq2seq": "model=seq2seq model.embedding_size=8 model.hidden_size=8 data.max_length=8",
    "dcgan": f"model=dcgan {IMAGES} {SOME} model.generator_width=4 model.discriminator_width=4",
    "conv_autoencoder": f"model=conv_autoencoder {IMAGES} {SOME} model.width=2 model.code_size=4",
    "deep_speech2": "model=deep_speech2 model.channels=2 model.hidden_size=8 data.batch_size=4",
    "alexnet": "model=alexnet optim=sgd_alexnet data=digits_64 data.batch_size=2",
    "resnet50": "model=resnet50 optim=sgd data.batch_size=2",
}
CASES = [
    (model, mode)
    for model in ("lstm_lm", "sampled", "seq2seq", "dcgan", "conv_autoencoder")
    for mode in ("fp32", "fp16_naive", "fp16_master_scaled", "amp")
]
CASES += [("gpt", "fp16_master_scaled"), ("alexnet", "fp16_master_scaled")]
CASES += [("deep_speech2", "fp16_master_scaled")]


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """What needs a driver and is not what is tested: events, page-locked memory, generators."""
    own = build_run_module.build_data

    def build_data(config, seed, device):
        with on_the_host():
            return WithoutValues(own(config, seed, CPU))

    def send(ring, values):
        assert isinstance(values, OnGpu) and values.dtype is torch.float32 and values.dim() == 1
        return Sent(torch.zeros(len(values)), Moment(CPU))

    monkeypatch.setattr(build_run_module, "build_data", build_data)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # seeds nothing
    # It looks at the dtype that a GPU computes in.
    monkeypatch.setattr(build_run_module, "why_no_lstm", lambda *_, **__: None)
    monkeypatch.setattr(PinnedRing, "_buffer", lambda ring, size: torch.zeros(size))
    monkeypatch.setattr(PinnedRing, "send", send)
    monkeypatch.setattr("mprun.training.metric_buffer.Moment", lambda device: Moment(CPU))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.zeros(16))


def built(*overrides):
    config = compose_config([*overrides, "train.cuda_graph=off", "train.steps=20"]).config
    return build(config, GPU)


@pytest.mark.parametrize(("model", "mode"), CASES)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.few(1)
def test_two_intervals_wait_for_nothing(monkeypatch, model, mode):
    monkeypatch.setattr(failure, "SHORTEST_PAUSE_S", 0.0)
    monkeypatch.setattr(failure, "PAUSE_FACTOR", 0.0)
    with without_values() as state:
        run = built(*MODELS[model].split(), f"precision={mode}")
        trace = MetricBuffer(GPU, 0, run.task.loss_scales)
        keeper = FailureKeeper(run)
        keeper.keep(0, 0)
        with steps(state):
            for index in range(4):
                measure = index % 2 == 1
                metrics = run.stepper.step(index, measure=measure)
                trace.add(index + 1, metrics)
                if measure:
                    trace.close(logged=True)
                    keeper.keep_if(index + 1, run.stepper.skipped, trace.sound)
    assert all(isinstance(value, OnGpu) for value in metrics.values())
    assert [unread.steps for unread in trace.unread] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "setting",
    [
        "optim.schedule=linear",
        "optim=sgd optim.implementation=foreach optim.momentum=0.9",
        "optim=adam optim.implementation=loop",
        "optim=adagrad optim.implementation=foreach",
        "train.accumulate=2",
        "train.clip_norm=0.25",
        "optim.average_decay=0.99",
        "scaler=logmax",
        "scaler=static",
        "scaler.hysteresis=2",
        "train.channels_last=on",
    ],
)
@pytest.mark.few(2)
def test_other_settings_wait_for_nothing(setting):
    with without_values() as state:
        model = MODELS["conv_autoencoder"].split()
        run = built(*model, "precision=fp16_master_scaled", *setting.split())
        with steps(state):
            for index in range(2):
                run.stepper.step(index, measure=True)


def flag(form):
    return (form > 0).any()


READS = {
    "item": lambda form, host: form.sum().item(),
    "bool": lambda form, host: bool(flag(form)),
    "if": lambda form, host: 1 if flag(form) else 0,
    "float": lambda form, host: float(form.sum()),
    "int": lambda form, host: int(form.sum()),
    "index": lambda form, host: [1, 2, 3][form.long().sum()],
    "tolist": lambda form, host: form.tolist(),
    "cpu": lambda form, host: form.cpu(),
    "to cpu": lambda form, host: form.to("cpu"),
    "mask": lambda form, host: form[form > 0],
    "write by mask": lambda form, host: form.__setitem__(form > 0, form),
    "nonzero": lambda form, host: form.nonzero(),
    "where": lambda form, host: torch.where(form > 0),
    "unique": lambda form, host: form.unique(),
    "equal": lambda form, host: torch.equal(form, form),
    "repeat_interleave": lambda form, host: torch.repeat_interleave(form, form.long()),
    "from the host": lambda form, host: host.to(GPU),
    "constant": lambda form, host: torch.tensor([1.0], device="cuda"),
    "copy_": lambda form, host: form.copy_(host),
    "to the host": lambda form, host: host.copy_(form),
    "index of the host": lambda form, host: form[host.long()],
    "alpha": lambda form, host: torch._foreach_add_([form], [form], alpha=form.sum()),
}


@pytest.mark.parametrize("name", READS)
def test_the_block_sees_what_waits(name):
    with without_values() as state:
        host, form = torch.ones(4), on_gpu(torch.ones(4))
        with steps(state), pytest.raises(HostRead):
            READS[name](form, host)


def test_the_block_lets_through_what_does_not_wait():
    with without_values() as state:
        form = on_gpu(torch.ones(4))
        with steps(state):
            kept = torch.where(flag(form), form, torch.zeros(4, device="cuda"))
            kept.add_(torch.ones(())).mul_(2.0)  # a number of the host goes along by value
            assert kept.index_select(0, torch.arange(2, device="cuda")).shape == (2,)
            assert (kept[1:], kept.half(), kept.to(GPU))[2] is kept
            assert torch.ones(3).sum().item() == 3.0  # the host's own
