"""Every test starts from the same random numbers."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Seed torch, whatever ran before."""
    torch.manual_seed(0)
