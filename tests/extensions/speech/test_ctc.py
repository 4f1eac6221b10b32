"""CTC against torch's loss in float64 and by hand; edit distances by hand and against jiwer."""

import math
import random

import pytest
import torch
from torch.nn import functional as F

from mprun.extensions.speech.ctc import ctc_losses, edit_distances, greedy


def drawn(seed, time=20, n=24, most=6, symbols=5):
    """Cases with every length, some without any path, over few symbols: repetitions."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(time, n, symbols, generator=generator, dtype=torch.float64)
    frames = torch.randint(1, time + 1, (n,), generator=generator)
    lengths = torch.randint(0, most + 1, (n,), generator=generator)
    text = torch.randint(1, symbols, (n, most), generator=generator)
    return logits, frames, text, lengths


def of_torch(logits, frames, text, lengths):
    log_probs = logits.log_softmax(2)
    return F.ctc_loss(log_probs, text, frames, lengths, reduction="none", zero_infinity=True)


@pytest.mark.parametrize("seed", range(4))
def test_losses_and_gradients_are_those_of_torch(seed):
    logits, frames, text, lengths = drawn(seed)
    own = logits.float().requires_grad_()
    losses = ctc_losses(own, frames, text, lengths)
    reference = logits.float().double().requires_grad_()
    expected = of_torch(reference, frames, text, lengths)
    assert (expected == 0).any() and (lengths == 0).any() and losses.dtype is torch.float32
    weights = torch.arange(1, len(frames) + 1)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    # Some 20 additions of logarithms below 200, each rounded to 2^-24 of it; a probability has the
    # relative error that its logarithm has as an absolute one.
    atol = 20 * 200 * 2**-24
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=atol)
    most = atol * weights.max().item()
    torch.testing.assert_close(own.grad.double(), reference.grad, rtol=0, atol=most)


def test_two_frames_by_hand():
    """Symbols blank, a: "a" is spelled by aa, a- and -a."""
    p, q = 0.3, 0.9
    logits = torch.tensor([[[1 - p, p]], [[1 - q, q]]]).log()
    loss = ctc_losses(logits, torch.tensor([2]), torch.tensor([[1]]), torch.tensor([1]))
    assert loss.item() == pytest.approx(-math.log(1 - (1 - p) * (1 - q)), abs=2**-22)


def test_a_text_that_no_path_spells_counts_nothing():
    """ "aa" needs a blank between: three frames."""
    logits = torch.randn(3, 2, 3, requires_grad=True)
    text = torch.tensor([[1, 1], [1, 1]])
    losses = ctc_losses(logits, torch.tensor([2, 3]), text, torch.tensor([2, 2]))
    losses.sum().backward()
    assert losses[0] == 0 and not logits.grad[:, 0].any()
    assert losses[1] > 0 and logits.grad[:, 1].any()


def test_a_loss_that_is_no_number_is_told():
    logits = torch.full((3, 1, 3), torch.nan)
    assert ctc_losses(logits, *(torch.tensor(x) for x in ([3], [[1]], [1]))).isnan().all()


def test_what_is_behind_an_utterance_has_no_part():
    logits, frames, text, lengths = drawn(0)
    other = logits.clone()
    other[torch.arange(len(logits))[:, None] >= frames] = 17.0
    with_ends = torch.where(torch.arange(text.shape[1]) < lengths[:, None], text, 3)
    given = (ctc_losses(x, frames, t, lengths) for x, t in ((logits, text), (other, with_ends)))
    assert torch.equal(*given)


def heard(paths, frames=None):
    """Return the greedy decoding of the likeliest symbols, as lists."""
    best = torch.tensor(paths).t()
    frames = torch.tensor(frames or [len(path) for path in paths])
    texts, lengths = greedy(F.one_hot(best, 5).float(), frames)
    return [row[:length].tolist() for row, length in zip(texts, lengths, strict=True)]


def test_greedy_decoding():
    paths = [[0, 0, 0, 0, 0], [1, 1, 0, 1, 2], [3, 3, 3, 3, 3], [0, 4, 4, 0, 2]]
    assert heard(paths) == [[], [1, 1, 2], [3], [4, 2]]
    assert heard(paths, [5, 3, 0, 4]) == [[], [1], [], [4]]


def distances(pairs):
    def padded(texts):
        rows = [torch.tensor([*map(ord, text)], dtype=torch.int64) for text in texts]
        lengths = torch.tensor([len(text) for text in texts])
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=7), lengths

    return edit_distances(*padded([a for a, _ in pairs]), *padded([b for _, b in pairs])).tolist()


def test_edit_distances_by_hand():
    by_hand = {("", ""): 0, ("", "abc"): 3, ("abc", ""): 3, ("kitten", "sitting"): 3}
    by_hand |= {("saturday", "sunday"): 3, ("abc", "bcd"): 2, ("aaaa", "a"): 3, ("ab", "ba"): 2}
    assert distances(list(by_hand)) == list(by_hand.values())
    assert distances([("", "")]) == [0]


def test_edit_distances_of_an_independent_implementation():
    jiwer = pytest.importorskip("jiwer")
    source = random.Random(1)
    texts = ["".join(source.choices("abcd", k=source.randint(1, 12))) for _ in range(80)]
    pairs = list(zip(texts[:40], texts[40:], strict=True))
    found = [jiwer.process_characters(a, b) for a, b in pairs]
    assert distances(pairs) == [x.substitutions + x.deletions + x.insertions for x in found]
    rate = sum(distances(pairs)) / sum(len(a) for a, _ in pairs)
    assert rate == pytest.approx(jiwer.cer([a for a, _ in pairs], [b for _, b in pairs]))
