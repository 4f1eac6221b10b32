"""The candidates against their distribution, the losses against float64, evaluation in blocks."""

import itertools
import math
from functools import partial

import numpy
import pytest
import torch
from scipy.stats import chisquare
from torch.nn import functional as F

from mprun.models.lstm import BLOCK, LogUniformSampler, OutputTable, SampledSoftmax
from mprun.precision.module_dtypes import cast_rows

from ..helpers import without_waiting

CPU = torch.device("cpu")


def zipf(vocabulary):
    """P(k) as TensorFlow's documentation states it, in float64."""
    k = numpy.arange(vocabulary)
    return (numpy.log(k + 2) - numpy.log(k + 1)) / math.log(vocabulary + 1)


def table_of(vocabulary, width, dtype=torch.float32):
    table = OutputTable(vocabulary, width)
    with torch.no_grad():
        table.weight.normal_()
        table.bias.normal_()
    return table.to(dtype)


def test_the_formula():
    sampler = LogUniformSampler(1000, 10)
    found = sampler.probability(torch.arange(1000)).numpy()
    # float32: log1p and the reciprocal are each right to 2^-23 or so.
    numpy.testing.assert_allclose(found, zipf(1000), rtol=2.0**-20)
    assert zipf(1000).sum() == pytest.approx(1.0)


@pytest.mark.slow
def test_the_first_arrival_has_the_log_uniform_distribution():
    sampler, draws = LogUniformSampler(30, 1), 5_000
    drawn = torch.cat([sampler.draw(CPU)[0] for _ in range(draws)])
    counts = torch.bincount(drawn, minlength=30).numpy()
    assert chisquare(counts, zipf(30) * draws).pvalue > 0.001
    # The control: a quarter off in one word of three. By 5,000 x 0.25^2 x 2/9 = 69 the statistic
    # grows beyond its 29, three of its deviations above where p is 0.05.
    tilted = zipf(30) * numpy.where(numpy.arange(30) % 3, 1.0, 1.25)
    assert chisquare(counts, tilted / tilted.sum() * draws).pvalue < 0.05


@pytest.mark.slow
def test_the_set_is_that_of_drawing_until_enough_are_different():
    """All 56 sets of 3 of 8 words, by enumeration of the orders in which they can be drawn."""
    p, draws = zipf(8), 5_000
    expected = dict.fromkeys(itertools.combinations(range(8), 3), 0.0)
    for a, b, c in itertools.permutations(range(8), 3):
        chance = p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b])
        expected[tuple(sorted((a, b, c)))] += chance
    assert sum(expected.values()) == pytest.approx(1.0)
    sampler, counts = LogUniformSampler(8, 3), dict.fromkeys(expected, 0)
    for _ in range(draws):
        counts[tuple(sorted(sampler.draw(CPU)[0].tolist()))] += 1
    chances = numpy.array(list(expected.values()))
    assert chisquare(list(counts.values()), chances * draws).pvalue > 0.001


@pytest.mark.slow
def test_the_correction_is_unbiased_for_each_word():
    """The mean of [k drawn] / (1 - exp(-P(k) t)) is 1, whatever k."""
    sampler, draws = LogUniformSampler(40, 10), 20_000
    weights = torch.zeros(draws, 40, dtype=torch.float64)
    for row in weights:
        ids, t = sampler.draw(CPU)
        row[ids] = torch.exp(-sampler.log_inclusion(ids, t)).double()
    mean = weights.mean(0)
    error = weights.std(0) / math.sqrt(draws)
    # Forty means at once: 4 standard errors are exceeded by chance in 1 of 400 runs.
    assert ((mean - 1).abs() < 4 * error).all()
    assert (error < 0.03).all()


def test_as_many_candidates_as_words_is_all_of_them():
    before = torch.get_rng_state()
    sampler = LogUniformSampler(50, 50)
    ids, t = sampler.draw(CPU)
    assert torch.equal(ids, torch.arange(50))
    assert torch.equal(sampler.log_inclusion(ids, t), torch.zeros(50))
    assert torch.equal(torch.get_rng_state(), before)
    assert SampledSoftmax(50, 8192).sampler.count == 50


def reference(hidden, targets, table, candidates, t):
    """The sampled loss per token in float64, with gradients of dense tables."""
    weight = table.weight.detach().double().requires_grad_()
    bias = table.bias.detach().double().requires_grad_()
    p = torch.from_numpy(zipf(len(weight)))
    log_q = torch.log(-torch.expm1(-p * t.double()))
    scores = hidden @ weight.t() + bias - log_q
    rows = []
    for row, target in zip(scores, targets.tolist(), strict=True):
        others = [k for k in candidates.tolist() if k != target]
        rows.append(F.cross_entropy(row[[target, *others]][None], torch.tensor([0])))
    return torch.stack(rows), weight, bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_loss_and_gradients_against_float64(dtype):
    table, softmax = table_of(40, 16), SampledSoftmax(40, 12)
    # Values of the 16-bit format, so that rounding them changes nothing.
    table.weight.data, table.bias.data = (x.half().float() for x in (table.weight, table.bias))
    if dtype is torch.float16:  # as a mode does
        table.forward = partial(cast_rows, table.forward, dtype)
    hidden = torch.randn(64, 16).half().to(dtype).requires_grad_()
    targets = torch.randint(40, (64,))
    state = torch.get_rng_state()
    losses = softmax(hidden, targets, table)
    assert losses.dtype == torch.float32
    losses.mean().backward()
    torch.set_rng_state(state)
    candidates, t = softmax.sampler.draw(CPU)
    hits = torch.isin(targets, candidates)
    assert hits.any() and not hits.all()
    exact = hidden.detach().double().requires_grad_()
    expected, weight, bias = reference(exact, targets, table, candidates, t)
    expected.mean().backward()
    # Sums of 16 products of numbers around 1 in FP32, losses of up to 30.
    torch.testing.assert_close(losses.double(), expected, rtol=2.0**-18, atol=2.0**-16)
    dense = {name: own.grad.to_dense() for name, own in table.named_parameters()}
    # One rounding of each gradient to `dtype`; gradients of 64 tokens are around 2^-6.
    unit = 2.0**-11 if dtype is torch.float16 else 2.0**-18
    ours = dense["weight"], dense["bias"], hidden.grad
    for own, other in zip(ours, (weight.grad, bias.grad, exact.grad), strict=True):
        torch.testing.assert_close(own.double(), other, rtol=2 * unit, atol=unit * 2.0**-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_evaluation_in_blocks_is_the_full_softmax(dtype):
    vocabulary = 2 * BLOCK + 5  # two whole blocks and a rest
    table, softmax = table_of(vocabulary, 8, dtype), SampledSoftmax(vocabulary, 7).eval()
    hidden = torch.randn(24, 8)
    targets = torch.tensor([0, BLOCK - 1, BLOCK, vocabulary - 1] * 6)
    logits = hidden.double() @ table.weight.double().t() + table.bias.double()
    expected = F.cross_entropy(logits, targets, reduction="none")
    with torch.no_grad():
        losses = softmax(hidden, targets, table)
    assert losses.dtype == torch.float32
    # Logits around 10 and a logarithm of 16,389 terms, each in FP32.
    torch.testing.assert_close(losses.double(), expected, rtol=2.0**-18, atol=2.0**-18)


def test_large_logits_overflow_neither_loss():
    table, softmax = table_of(BLOCK + 10, 4), SampledSoftmax(BLOCK + 10, 50)
    hidden = torch.full((3, 4), 1e4)
    targets = torch.tensor([0, 5, BLOCK])
    assert softmax(hidden, targets, table).isfinite().all()
    with torch.no_grad():
        assert softmax.eval()(hidden, targets, table).isfinite().all()


def test_under_autocast_the_products_are_fp32():
    table, softmax = table_of(30, 8), SampledSoftmax(30, 30)
    hidden, targets = torch.randn(20, 8).half(), torch.randint(30, (20,))
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = softmax.eval()(hidden, targets, table)
        assert torch.equal(inside, softmax(hidden, targets, table))


@pytest.mark.gpu
def test_a_step_waits_for_nothing():
    table, softmax = table_of(5000, 64).cuda(), SampledSoftmax(5000, 512).cuda()
    hidden = torch.randn(128, 64, device="cuda").half().requires_grad_()
    targets = torch.randint(5000, (128,), device="cuda")
    softmax(hidden, targets, table).mean().backward()  # loads kernels
    table.zero_grad()
    with without_waiting():
        softmax(hidden, targets, table).mean().backward()
    assert hidden.grad.isfinite().all()
