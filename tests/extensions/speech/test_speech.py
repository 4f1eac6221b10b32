"""The speech task: CTC in FP32 in every mode, the character error rate, a run that learns."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import mprun.extensions.speech.task as speech_module
from mprun.assembly import build
from mprun.cli import main
from mprun.config.compose import compose_config

from ...helpers import ONE_CORE, numbers_of, run
from ...shipped import OF_ANY_NETWORK
from .cases import TINY

CPU = torch.device("cpu")


def built(*overrides):
    torch.manual_seed(0)
    return build(compose_config([*ONE_CORE, *TINY, *overrides]).config, CPU)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in OF_ANY_NETWORK if mode != "tf32"])
def test_the_loss_is_fp32_in_every_mode(monkeypatch, mode):
    seen = []

    def losses(logits, *others):
        found = own(logits, *others)
        seen.append((logits.dtype, found.dtype))
        return found

    own = speech_module.ctc_losses
    monkeypatch.setattr(speech_module, "ctc_losses", losses)
    run = built(f"precision={mode}", "data.batch_size=150")
    loss = run.task.train_step(0)["loss"]
    run.task.evaluate()
    half = run.policy.half_dtype or torch.float32
    assert seen[0] == (half, torch.float32) and loss.dtype is torch.float32
    # Master weights are evaluated in FP32.
    assert seen[1] == (torch.float32, torch.float32)


def test_a_step_is_that_of_torch_s_ctc_loss():
    run = built("optim.lr=1e-3")
    features, targets = run.data.train_batch(0)
    network = run.task.learner.model
    logits, frames = network(features, targets[:, 0])
    given = logits.log_softmax(2), targets[:, 2:], frames, targets[:, 1]
    expected = F.ctc_loss(*given, reduction="none").mean().item()
    assert run.task.train_step(0)["loss"].item() == pytest.approx(expected, rel=1e-5)


class Fixed:
    """Held-out batches of texts, and a network that hears fixed ones."""

    def __init__(self, texts, heard):
        self.batches = []
        for text, path in zip(texts, heard, strict=True):
            targets = torch.tensor([[len(path), len(text), *text, 0, 0][: 2 + 3]])
            logits = 20 * F.one_hot(torch.tensor(path)[:, None], 11).float()
            self.batches.append((logits, targets))

    def __call__(self, features, frames):
        return features, frames


CHARACTER_ERRORS = [
    ([[1, 2, 3]], [[1, 2, 3]], 0.0),
    ([[1, 2, 3]], [[0, 0, 0, 0]], 100.0),  # blanks alone
    ([[1, 2, 3], [4]], [[1, 0, 2, 2], [4, 0, 4]], 50.0),  # one left out, one inserted, of 4
    ([[], [1, 2]], [[0, 0], [1, 2]], 0.0),
    ([[], [1, 2]], [[3, 0], [1, 2]], 50.0),  # a symbol heard where there is none
    ([[]], [[3, 0]], 100.0),  # no symbol at all: over 1
]


def test_character_error_rate_by_hand(monkeypatch):
    run = built()
    for texts, heard, cer in CHARACTER_ERRORS:
        fixed = Fixed(texts, heard)
        data = SimpleNamespace(eval_batches=lambda f=fixed: iter(f.batches))
        monkeypatch.setattr(run.task, "data", data)
        evaluating = lambda *_, f=fixed: nullcontext(f)  # noqa: E731
        monkeypatch.setattr(type(run.task.learner), "evaluating", evaluating)
        assert run.task.evaluate()["cer"] == pytest.approx(cer), heard


@pytest.mark.slow
def test_resumed_in_the_middle_is_the_same_run(tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    common = [*ONE_CORE, *TINY, "precision=fp16_master_scaled", "train.eval_every=3"]
    assert run(whole, *common, "train.steps=6") == 0
    assert run(part, *common, "train.steps=3", "train.checkpoint_every=3") == 0
    assert main([f"resume={part}", "train.steps=6"]) == 0
    ends = [numbers_of(directory)[-1] for directory in (whole, part)]
    assert ends[0] == ends[1] and "cer" in ends[0]
