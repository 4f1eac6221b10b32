"""Sizes that a network cannot have are refused by name."""

from functools import partial

import pytest

from mprun.models.dcgan import Discriminator, Generator
from mprun.models.lstm import LogUniformSampler, LSTMLanguageModel


@pytest.mark.parametrize(
    ("build", "said"),
    [
        *((partial(Generator, size), f"image_size={size}") for size in (8, 48, 0)),
        *((partial(Discriminator, size), f"image_size={size}") for size in (8, 48, 0)),
        (partial(LogUniformSampler, 10, 0), "count"),
        (partial(LogUniformSampler, 10, 11), "count"),
        (partial(LogUniformSampler, 2**24, 5), "vocabulary"),
        (partial(LSTMLanguageModel, 11, 6, 8, 2, 8), "projection_size=8.*below hidden_size=8"),
    ],
)
def test_refused(build, said):
    with pytest.raises(ValueError, match=said):
        build()
