"""Tests of Lightning and of transformers share modes, equal ends, and pages that run."""

import re
from pathlib import Path

import torch

from ...helpers import assert_same_bits

MODES = ["fp16_naive", "fp16_master", "fp16_master_scaled", "amp", "bf16_master", "amp_bf16"]
# FP32, and the two ways to compute in FP16.
THREE = ["fp32", "fp16_master_scaled", "amp"]


class Seen:
    """A trainer of transformers keeps the losses of its steps."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(loss)
        return loss


def assert_same_end(losses, network, model, expected):
    """The losses of every step and the state after them are those of `model`, bit for bit."""
    assert_same_bits(torch.stack(losses), torch.stack(expected))
    assert_same_bits({**network.state_dict()}, {**model.state_dict()})


def run_page(name, folder, monkeypatch):
    """Execute what a page of docs/script shows, block by block, in `folder`.

    Blocks see the names of those before them. One under "<!-- not run: WHY -->" is left out.
    """
    monkeypatch.chdir(folder)
    page = Path(__file__).resolve().parents[3] / "docs" / "script" / name
    found = r"^(<!-- not run: .*? -->\n)?```python\n(.*?)^```"
    blocks = re.findall(found, page.read_text(encoding="utf-8"), re.S | re.M)
    assert blocks
    names = {"__name__": "__main__"}
    for left_out, block in blocks:
        if not left_out:
            exec(compile(block, name, "exec"), names)  # noqa: S102
