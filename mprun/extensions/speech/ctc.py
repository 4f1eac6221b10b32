"""Connectionist temporal classification: its loss, greedy decoding and edit distances.

Symbol 0 is the blank. All shapes are static, so that nothing waits for the device and a step can be
a CUDA graph. torch's `ctc_loss` reads lengths on the host and, on CUDA, sums gradients in no fixed
order.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

BLANK = 0


def ctc_losses(logits: Tensor, frames: Tensor, symbols: Tensor, lengths: Tensor) -> Tensor:
    """Return minus the logarithm of each text's probability, in nats, float32 `[n]`.

    Graves et al. (ICML 2006). A text that no path over its frames spells has probability 0. Its
    loss counts as 0, without a gradient, as in published implementations.

    Args:
        logits: `[time, n, num_symbols]` of any dtype; computed in FP32.
        frames: number of valid frames, int64 `[n]`.
        symbols: int64 `[n, most]`, padded with anything.
        lengths: number of valid symbols, int64 `[n]`.
    """
    log_probs = F.log_softmax(logits, 2, dtype=torch.float32)
    return _Paths.apply(log_probs, frames, symbols, lengths)


class _Paths(torch.autograd.Function):
    """Minus the log-probability of all paths that spell a text, from `log_probs` float32.

    One recursion computes the sums over paths up to a frame and from a frame on, side by side. It
    costs four operations a frame, forward and backward pass together.
    """

    @staticmethod
    def forward(ctx, log_probs: Tensor, frames: Tensor, symbols: Tensor, lengths: Tensor) -> Tensor:
        time, n, _ = log_probs.shape
        # A text with a blank in front of, between and behind its symbols: 2 most + 1 places.
        text = symbols.new_full((n, 2 * symbols.shape[1] + 1), BLANK)
        behind = torch.arange(symbols.shape[1], device=symbols.device) >= lengths[:, None]
        text[:, 1::2] = symbols.masked_fill(behind, BLANK)
        ends = 2 * lengths
        # The same text from its end, for the recursion from the last frame.
        both = torch.cat([text, _turned(text, ends)])
        emitted = log_probs.gather(2, text.expand(time, -1, -1))
        rows = torch.arange(time, device=frames.device)[:, None]
        order = torch.where(rows < frames, frames - 1 - rows, rows)
        back = _turned(emitted.gather(0, order[..., None].expand_as(emitted)), ends)
        # The blank may be skipped in front, and between two different symbols.
        may_skip = both != BLANK
        may_skip[:, 2:] &= both[:, 2:] != both[:, :-2]
        skip = torch.zeros(both.shape, device=text.device).masked_fill_(~may_skip, -torch.inf)
        paths = _recursion(torch.cat([emitted, back], 1), skip)
        # Paths up to a frame and place, and from there on; both include the emission there.
        upto, onward = paths[:, :n], _turned(paths[:, n:], ends)
        onward = onward.gather(0, order[..., None].expand_as(onward))
        last = upto.gather(0, (frames - 1).clamp(min=0)[None, :, None].expand(1, n, text.shape[1]))
        final = last[0].gather(1, torch.stack([ends, (ends - 1).clamp(min=0)], 1))
        final[:, 1].masked_fill_(lengths == 0, -torch.inf)
        total = final.logsumexp(1)
        total.masked_fill_((frames == 0) & (lengths == 0), 0.0)
        possible = total != -torch.inf
        if ctx.needs_input_grad[0]:
            share = torch.exp(upto + onward - emitted - total[:, None])
            places = torch.arange(text.shape[1], device=ends.device) <= ends[:, None]
            counts = (possible[:, None] & places) & (rows < frames)[..., None]
            share.masked_fill_(~counts, 0.0)
            ctx.save_for_backward(_by_symbol(share, text, log_probs))
        return torch.where(possible, -total, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (visits,) = ctx.saved_tensors  # expected visits of each symbol at each frame
        return -visits * gradient[:, None], None, None, None


def _by_symbol(share: Tensor, text: Tensor, like: Tensor) -> Tensor:
    """Sum the shares `[time, n, places]` of each symbol's places, in the same order everywhere."""
    total = torch.zeros_like(like)
    total[..., BLANK] = share[..., ::2].sum(2)
    for place in range(1, text.shape[1], 2):
        symbol = text[:, place : place + 1].expand(len(share), -1, -1)
        total.scatter_add_(2, symbol, share[..., place : place + 1])
    return total


def _turned(values: Tensor, ends: Tensor) -> Tensor:
    """Reverse places 0 to `ends` of each text in `[..., n, places]`."""
    places = torch.arange(values.shape[-1], device=ends.device)
    source = torch.where(places <= ends[:, None], ends[:, None] - places, places)
    return values.gather(-1, source.expand_as(values))


def _recursion(emitted: Tensor, skip: Tensor) -> Tensor:
    """Return the log-probability of all beginnings of paths that are at a place at a frame.

    emitted: `[time, n, places]`, log-probabilities of each place's symbol. skip: 0 where a path may
    skip the place before, otherwise -inf.
    """
    time, n, places = emitted.shape
    # In front: two places that no path comes from, and a frame in which all paths begin.
    paths = emitted.new_full((time + 1, n, places + 2), -torch.inf)
    paths[0, :, 1] = 0.0
    for before, now, row in zip(paths[:-1], paths[1:, :, 2:], emitted, strict=True):
        skipped = before[:, :-2] + skip
        stepped = torch.logaddexp(before[:, 2:], before[:, 1:-1])
        torch.add(torch.logaddexp(stepped, skipped), row, out=now)
    return paths[1:, :, 2:]


def greedy(logits: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
    """Decode each frame's likeliest symbol; drop repetitions, then blanks.

    Returns int64 `[n, time]`, and int64 `[n]`: how many of its first symbols are the text.
    """
    best = logits.argmax(2).t()
    counts = torch.arange(best.shape[1], device=frames.device) < frames[:, None]
    counts = counts & (best != BLANK)
    counts[:, 1:] &= best[:, 1:] != best[:, :-1]
    order = (~counts).to(torch.int8).argsort(dim=1, stable=True)
    return best.gather(1, order), counts.sum(1)


def edit_distances(texts: Tensor, lengths: Tensor, others: Tensor, other_lengths: Tensor) -> Tensor:
    """Return Levenshtein distances: the fewest insertions, deletions, replacements, int64 `[n]`.

    texts, others: int64 `[n, any]`; the first `lengths` and `other_lengths` symbols count.
    """
    places = torch.arange(others.shape[1] + 1, device=others.device)
    row = places.expand(len(others), -1)
    found = row
    for number, symbol in enumerate(texts.t(), start=1):
        replaced = row[:, :-1] + (others != symbol[:, None])
        first = torch.full_like(row[:, :1], number)
        best = torch.cat([first, torch.minimum(row[:, 1:] + 1, replaced)], 1)
        # Any number of insertions, one a place, from the best place on the left.
        row = (best - places).cummin(1).values + places
        found = torch.where((lengths == number)[:, None], row, found)
    return found.gather(1, other_lengths[:, None])[:, 0]
