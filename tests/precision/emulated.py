"""How far a value is from its reference, in roundings to a 16-bit format."""

import pytest
import torch

HALVES = (torch.float16, torch.bfloat16)
half = pytest.mark.parametrize("dtype", HALVES, ids=["fp16", "bf16"])


def relative(value, reference) -> float:
    """The relative error in the Frobenius norm."""
    reference = reference.detach()
    return float((value.detach().double() - reference).norm() / reference.norm())


def assert_within(roundings, value, reference, dtype=torch.float16) -> None:
    """`value` is off by so many times the error of rounding the reference once."""
    assert relative(value, reference) <= roundings * relative(reference.to(dtype), reference)
