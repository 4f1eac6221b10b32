"""The figures' numbers: what FP16 weights take up, from counts of exponents."""

import numpy as np

from mprun.extensions.paper.page import _half_ulps


def test_half_an_ulp_is_that_of_numpy():
    """Half an ulp is compared at each power of two, subnormal numbers included."""
    for exponent in range(-24, 16):
        half = float(np.spacing(np.float16(2.0**exponent))) / 2
        assert _half_ulps({exponent: 3}) == {int(np.log2(half)): 3}


def test_weights_that_fp16_holds_no_more_have_the_smallest_gap():
    assert _half_ulps({-40: 1, -24: 2, -14: 4}) == {-25: 7}
