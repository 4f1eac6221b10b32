"""Many tests need small runs and networks, one step, equal bits, refusals in one line."""

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from mprun.assembly.data import arguments_of
from mprun.cli import main
from mprun.config.components import NETWORKS, SOURCES
from mprun.entry_points import loaded
from mprun.precision import ForwardContext, NoLossScale, get_policy
from mprun.prepared.prepared_model import PreparedModel
from mprun.record.metrics import read_metrics
from mprun.record.run_record import Record
from mprun.tasks import Learner

# Small runs as the overrides a user would type: a step takes milliseconds on one core. They
# evaluate at their end alone, unless more is said.
ONE_CORE = ["device=cpu", "threads=1", "train.eval_every=0"]
LM = [
    *ONE_CORE,
    *"model=lstm_lm model.hidden_size=16 model.embedding_size=16".split(),
    *"data.vocab_limit=100 data.batch_size=4 data.sequence_length=5".split(),
]
# Without the text of the documentation, which takes a moment to read.
TINY_LM = [
    *ONE_CORE,
    *"model=lstm_lm model.hidden_size=8 model.embedding_size=8 data=synthetic_tokens".split(),
    *"data.vocab_size=16 data.sequence_length=4 data.batch_size=2".split(),
    *"data.train_tokens=200 data.eval_tokens=100".split(),
]
TINY_GAN = [
    *ONE_CORE,
    *"model=dcgan data=synthetic_images data.value_range=tanh data.image_size=32".split(),
    *"data.train_size=64 data.eval_size=16 data.batch_size=8".split(),
    *"model.latent_size=8 model.generator_width=4 model.discriminator_width=4".split(),
]
TINY_AUTOENCODER = [
    *ONE_CORE,
    *"model=conv_autoencoder data.image_size=32 data.batch_size=8".split(),
    *"model.width=2 model.code_size=4".split(),
]
TINY_GPT = [
    *ONE_CORE,
    *"model=gpt model.hidden_size=32 model.num_layers=1 model.num_heads=2".split(),
    *"data=synthetic_tokens data.vocab_size=64 data.batch_size=4 data.sequence_length=16".split(),
    *"data.train_tokens=2048 data.eval_tokens=512".split(),
]
TINY_MOE = [own if own != "model=gpt" else "model=gpt_moe" for own in TINY_GPT]
TINY_MOE += ["model.kv_heads=null", "model.expert_size=32"]


def run(directory, *overrides) -> int:
    """The exit code of `mprun ... output_dir=directory` in this process."""
    return main([*overrides, f"output_dir='{directory}'"])


def but(words, *changes) -> list[str]:
    """The overrides `words` and `changes`, of each key the last one alone."""
    return list({word.partition("=")[0]: word for word in (*words, *changes)}.values())


def record_of(directory) -> dict:
    """Return the content of run.json."""
    return json.loads((Path(directory) / "run.json").read_text())


def rows_of(directory, split=None) -> list[dict]:
    """The lines of metrics.jsonl, of one split or of all."""
    rows = read_metrics(Path(directory) / "metrics.jsonl")
    return [row for row in rows if split in (None, row["split"])]


def numbers_of(directory, split=None) -> list[str]:
    """The lines of metrics.jsonl without what a clock tells; as text, so that NaN equals NaN."""
    timings = ("samples_per_s", "seconds")
    rows = rows_of(directory, split)
    return [json.dumps({k: v for k, v in row.items() if k not in timings}) for row in rows]


def settings_of(make) -> dict:
    """Return a builder's arguments by name, with defaults, or an options object's fields."""
    found = {}
    for name, parameter in inspect.signature(make).parameters.items():
        options = dataclasses.is_dataclass(parameter.annotation)
        own = settings_of(parameter.annotation) if options else {name: parameter.default}
        found |= own
    return found


def configured(component, **changes):
    """A network or source as a configuration builds it: its defaults, but for the changes.

    Those that are no fields are sizes from the data, seed and device.
    """
    found = (NETWORKS | SOURCES)[component]
    config, builder = found.config(), found.builder
    if isinstance(builder, dict):
        builder = builder[changes.pop("variant", config.variant)]
    make = loaded(builder)
    for name in changes.keys() & config.__dataclass_fields__.keys():
        setattr(config, name, changes.pop(name))
    of_run = {name: changes.pop(name) for name in ("seed", "device") if name in changes}
    return make(**arguments_of(make, config, **of_run) | changes)


def network(inputs=6, hidden=16, outputs=3, norm=None, activation=nn.ReLU) -> nn.Sequential:
    """Two linear layers from seed 0; norm: a class of layers between them, nn.BatchNorm1d say."""
    torch.manual_seed(0)
    between = [] if norm is None else [norm(hidden)]
    return nn.Sequential(
        nn.Linear(inputs, hidden), *between, activation(), nn.Linear(hidden, outputs)
    )


def making(optimizer, *arguments, **settings):
    """Return a maker of an optimizer for (name, tensor) pairs: making(torch.optim.SGD, 0.1)."""
    return lambda named: optimizer([tensor for _, tensor in named], *arguments, **settings)


def mixed(model, mode, make=None, scale=None, *, overrides=None, seed=0, native=False, **options):
    """The learner of a model in a mode, as a run builds it.

    make: as of `making`, plain SGD of rate 1. options: arguments of `Learner`.
    """
    policy = get_policy(mode) if isinstance(mode, str) else mode
    device = next(model.parameters()).device
    context = ForwardContext(policy, device, native=native, overrides=(overrides or {}).values())
    scale = scale or NoLossScale(device)
    prepared = PreparedModel(model, context, scale, overrides or {}, of_run=True, seed=seed)
    trained = [(name, own) for name, own in model.named_parameters() if own.requires_grad]
    return Learner(prepared, (make or making(torch.optim.SGD, 1.0))(trained), **options)


def one_step(learner, inputs, loss=lambda outputs: outputs.square().mean(), measure=False):
    """Take one step on the outputs; what `Learner.step` says of it."""
    learner.zero_grad()
    loss(learner.network(inputs)).backward()
    learner.end_part()
    return learner.step(measure)


@contextmanager
def without_waiting():
    """Raise an error for each wait for the GPU in this block."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def skipping_what_onednn_lacks():
    """Skip where oneDNN has no kernel for these sizes with the instructions of this processor."""
    try:
        yield
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip("oneDNN has no such product on this processor")


def assert_same_bits(one, other) -> None:
    """Nested values of the same form: tensors of equal dtype and bits, NaN being equal to NaN."""
    (left, form), (right, other_form) = tree_flatten_with_path(one), tree_flatten_with_path(other)
    assert form == other_form
    for (path, a), (_, b) in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), keystr(path)
            a, b = a.detach().reshape(-1, 1), b.detach().reshape(-1, 1)
            same = (a.view(torch.uint8) == b.view(torch.uint8)).all(1)
            assert (same | (a.isnan() & b.isnan())[:, 0]).all(), keystr(path)
        else:
            assert a == b or (a != a and b != b), keystr(path)


def seal_again(run, **changes) -> None:
    """Change fields of run.json and seal the run as it is now, like a forger."""
    Record(run, record_of(run) | changes).seal()


def refused(capsys, *arguments, says=(), code=2) -> str:
    """The one line of a command that must end with `code`; `says`: what the line must hold."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == code
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1, printed
    for part in (says,) if isinstance(says, str) else says:
        assert part in printed.err
    return printed.err


@contextmanager
def raises_line(error, *parts):
    """`error` must be raised with one line that holds every part, literally."""
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert re.search(re.escape(part), message), message


def printed_by(script: Path) -> Any:
    """Run a script under Triton's interpreter; return its last line, which is JSON.

    In a process of its own: Triton decides at its first import whether it interprets.
    """
    root = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])
