"""Cross-entropy that computes in FP32 what it reads in 16 bits."""

import pytest
import torch
from torch.nn import functional as F

from mprun.tasks.supervised import cross_entropy

from ..helpers import TINY_LM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_loss_and_gradient_are_those_of_cast_logits(dtype, smoothing, ignored):
    """And, within some 2^-24 of logarithms below 40, those of the formula in float64."""
    torch.manual_seed(0)
    logits = (5 * torch.randn(37, 101)).to(dtype)
    one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    labels = torch.randint(101, (37,))
    labels[::5] = ignored
    given = {"label_smoothing": smoothing, "ignore_index": ignored}
    expected = F.cross_entropy(one.float(), labels, **given)
    loss = cross_entropy(other, labels, torch.float32, smoothing, ignored)
    surprise = -logits.double().log_softmax(1)[labels != ignored]
    wanted = (1 - smoothing) * surprise[range(len(surprise)), labels[labels != ignored]]
    wanted = wanted + smoothing * surprise.mean(1)
    assert loss.item() == pytest.approx(wanted.mean().item(), abs=2**-18)
    for value in (expected, loss):
        value.backward(torch.tensor(1000.0))
    assert torch.equal(loss, expected) and loss.dtype == torch.float32
    assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_loss_in_16_bits_is_emulated_and_no_other(build_run, dtype):
    words = [*TINY_LM, "precision=fp16_master", f"precision.loss_dtype={dtype}"]
    task = build_run(*words).task
    assert (task.watched() is task.forward_context) == (dtype == "fp16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_makes_no_fp32_copy_of_fp16_logits():
    logits = torch.randn(1024, 4096, device="cuda").half().requires_grad_()
    labels = torch.zeros(1024, dtype=torch.int64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cross_entropy(logits, labels, torch.float32).backward()
    # FP32 logarithms of the probabilities, and an FP16 gradient.
    assert torch.cuda.max_memory_allocated() - before < 1.1 * 6 * logits.numel()
