"""A fused kernel of torch is detected by using it."""

import pytest
import torch
from torch.optim import Adagrad

from mprun.precision.torch_update import has_fused_kernel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget():
    has_fused_kernel.cache_clear()
    yield
    has_fused_kernel.cache_clear()


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "adagrad"])
def test_torch_has_them_on_a_cpu(kind):
    assert has_fused_kernel(kind, CPU)


def test_an_optimizer_that_refuses_its_kernel_has_none(monkeypatch):
    """As Adagrad of torch 2.11 does for CUDA, in `step` alone, though the kernel is there."""

    def step(self, closure=None):
        raise RuntimeError("`fused=True` requires all the params to be on a supported device")

    monkeypatch.setattr(Adagrad, "step", step)
    assert not has_fused_kernel("adagrad", CPU) and has_fused_kernel("sgd", CPU)
