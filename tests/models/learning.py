"""The backward pass has to reach these parameters."""

import torch


def assert_learns(*models) -> None:
    """Every parameter has a finite gradient that is not zero."""
    for model in models:
        for name, parameter in model.named_parameters():
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.count_nonzero() > 0, name
