"""Sizes that a network cannot have are refused by name."""

from functools import partial

import pytest

from mprun import models


@pytest.mark.parametrize(
    ("build", "said"),
    [
        *(
            (partial(kind, size), f"image_size={size}")
            for size in (8, 48, 0)
            for kind in (models.Generator, models.Discriminator)
        ),
        *((partial(models.LocalResponseNorm, size), f"size={size}") for size in (0, 4)),
        (partial(models.LogUniformSampler, 10, 0), "count"),
        (partial(models.LogUniformSampler, 10, 11), "count"),
        (partial(models.LogUniformSampler, 2**24, 5), "vocabulary"),
        (
            partial(models.LSTMLanguageModel, 11, 6, 8, 2, projection_size=8),
            "projection_size=8.*below hidden_size=8",
        ),
    ],
)
def test_refused(build, said):
    with pytest.raises(ValueError, match=said):
        build()
