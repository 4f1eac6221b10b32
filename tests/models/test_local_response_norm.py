"""The own local response normalisation against torch's in float64, and in half."""

import pytest
import torch

from mprun.models.classifiers import LocalResponseNorm


@pytest.mark.parametrize(
    ("size", "alpha", "beta", "k"), [(5, 1e-4, 0.75, 1.0), (3, 2.0, 0.5, 2.0), (7, 0.5, 1.0, 1.0)]
)
def test_equals_torch_forward_and_backward(size, alpha, beta, k):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 9, 5, 4, dtype=torch.float64, generator=generator).mul_(3).requires_grad_()
    upstream = torch.randn(3, 9, 5, 4, dtype=torch.float64, generator=generator)
    ours = LocalResponseNorm(size, alpha, beta, k)(x)
    reference = torch.nn.LocalResponseNorm(size, alpha, beta, k)(x)
    # A dozen float64 roundings (2^-53 each) on values of order 1 to 10.
    torch.testing.assert_close(ours, reference, rtol=1e-13, atol=1e-13)
    (gradient,) = torch.autograd.grad(ours, x, upstream)
    (expected,) = torch.autograd.grad(reference, x, upstream)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_on_a_cpu_forward_and_backward(dtype):
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(2, 16, 6, 6, dtype=torch.float64, generator=generator).mul_(20).to(dtype)
    x = exact.clone().requires_grad_()
    y = LocalResponseNorm(5)(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    x64 = exact.double().requires_grad_()
    reference = torch.nn.LocalResponseNorm(5, 1e-4, 0.75, 1.0)(x64)
    reference.sum().backward()
    # Six roundings between input and output (scale, square, sum, 1 +, power, product), half an
    # eps each; the squares' share in the result is below 1, so none is magnified.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), reference, rtol=3 * eps, atol=0)
    # Backward sums five neighbours' terms, each with as many roundings again.
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=8 * eps, atol=8 * eps)


def test_float16_stays_finite_where_the_plain_square_overflows():
    x = torch.full((1, 5, 1, 1), 20_000.0, dtype=torch.float16)
    assert torch.isinf(x * x).all()
    y = LocalResponseNorm(size=1)(x)
    # 1 + 1e-4 * 4e8 = 40001; 20000 * 40001^-0.75 = 7.071, with five roundings of 2^-11, the inner
    # ones times the exponent.
    torch.testing.assert_close(y.double(), torch.full_like(y, 7.0709).double(), rtol=4e-3, atol=0)
