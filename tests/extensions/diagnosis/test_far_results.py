"""Which operation of a first step is far from FP32's: planted causes, and healthy networks."""

import pytest
import torch

from mprun.config.compose import compose_config
from mprun.extensions.diagnosis.far_results import FAR, Result, first_far, results
from mprun.numerics.trace import Phase
from mprun.training.run import prepare

from .planted import NETWORKS


def steps_of(name):
    """The first step of a network of the list, in its mode and in FP32."""
    own = NETWORKS[name]
    fp32 = [word for word in own.words if not word.startswith("scaler")]
    for line in ([*own.words, f"precision={own.mode}"], [*fp32, "precision=fp32"]):
        yield results(prepare(compose_config(line).config, torch.device("cpu"), 1))


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:first. linear meets fp32")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        # 20000 is added and subtracted: BF16 has steps of 128 there.
        ("offset.a", "shift: sub cancels numbers up to 2e+04, which add made, as BF16 has rounded"),
        ("variance_by_moments.b", "moments: sub cancels numbers up to"),
        # (1e-5 x)^2 is below 2^-25.
        ("small_square.a", "energy: mul underflows: "),
        ("input_too_small.a", "casting the inputs: the cast underflows: "),
        # FP16 has every second number from 2048 on.
        ("positions_beyond_2048.a", "casting the inputs: the cast loses whole numbers in FP16: "),
        ("integers_beyond_256.b", "count: sum loses whole numbers in BF16: "),
        ("second_moment_underflows.a", "the optimizer: its state exp_avg_sq underflows: "),
    ],
)
def test_a_planted_cause_is_found(name, words):
    far = first_far(*steps_of(name))
    assert far is not None and far.in_words().startswith(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("healthy.perceptron_bf16", "healthy.convolution_fp16", "healthy.layer_norm"),
        *("healthy.batch_norm", "healthy.causal_attention", "healthy.experts"),
        *("healthy.reader_amp_bf16", "healthy.recurrent"),
    ],
)
def test_nothing_is_far_in_a_healthy_network(name):
    own, reference = steps_of(name)
    assert len(own) > 10 and first_far(own, reference) is None


def result(values, *, name="mul", dtype=torch.float16, largest=1.0, cast=None):
    shown = torch.tensor(values, dtype=torch.float32)
    given = None if cast is None else torch.tensor(cast)
    place = Phase.FORWARD, "layer", name
    return Result(*place, dtype, shown.shape, shown, largest, "add", given)


@pytest.mark.parametrize(
    ("own", "exact", "options", "words"),
    [
        ([1.0, 1.05], [1.0, 1.0], {}, None),
        ([1.0, 1.3], [1.0, 1.0], {}, "what mul computes differs from FP32's"),
        # FP32's own rounding of numbers 2^20 times as large is as far.
        ([1.0, 1.3], [1.0, 1.0], {"name": "sub", "largest": 2.0**20}, None),
        ([1.0, 1.3], [1.0, 1.0], {"name": "sub", "largest": 100.0}, "sub cancels numbers up to 1"),
        ([0.0, 2e-8], [1e-8, 2e-8], {}, "mul underflows: 50 % of its results round to 0 in FP16"),
        ([2048.0, 2052.0], [2049.0, 2051.0], {}, "mul loses whole numbers in FP16: 2049 becomes"),
        ([0.0, 1.0], [0.0, 1.0], {}, None),
        ([float("inf"), 1.0], [1e6, 1.0], {}, None),  # a matter of `explain`'s culprit
    ],
)
def test_each_way_to_be_far(own, exact, options, words):
    far = first_far([result(own, **options)], [result(exact, **options)])
    assert (None if far is None else far.reason[: len(words or "")]) == words
    if far is not None:
        error = torch.tensor(own) - torch.tensor(exact)
        wanted = (error.square().mean() / torch.tensor(exact).square().mean()).sqrt()
        assert far.error == pytest.approx(float(wanted), rel=1e-6)


def test_a_cast_is_set_beside_what_it_casts():
    cast = result([0.0, 1e-7], name="_to_copy", cast=[1e-9, 1e-7])
    assert first_far([cast], []) is None  # 1 % off
    cast = result([0.0, 0.0], name="_to_copy", cast=[1e-9, 1e-9])
    far = first_far([cast], [])
    assert far.reason.startswith("the cast underflows: 1e+02 %") and far.error == 1 > FAR


def test_calls_that_cannot_be_matched_are_left_out():
    wrong = result([5.0, 5.0])
    assert first_far([wrong, wrong], [result([1.0, 1.0])]) is None
    assert first_far([wrong], [result([1.0, 1.0])]) is not None
