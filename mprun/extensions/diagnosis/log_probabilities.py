"""Compute log-probabilities of the same tokens under the same weights, and their differences.

Reinforcement learning of language models calls the ratio exp(a - b) of a token's probability under
two computations of one policy the mismatch of training and inference. Importance sampling takes it
for a change of the policy (Qi et al., arXiv 2510.26788).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.data.source import Source
from mprun.tasks import LanguageModel


class Windows(NamedTuple):
    """Both int64 [windows, time], targets one token ahead."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between log-probabilities a and b, both in nats.

    differing, nonfinite: tokens where a is not b, and where a or b is not finite. The last count as
    outside of the band and in nothing else. rms, mean, largest: root mean square, bias, largest
    magnitude of a - b, in nats. ratio_rms: root mean square of exp(a - b) - 1, the probability
    ratio less one. outside: share of the tokens with |exp(a - b) - 1| above the band.
    """

    tokens: int
    differing: int
    nonfinite: int
    rms: float
    mean: float
    largest: float
    ratio_rms: float
    outside: float


def held_out_windows(data: Source, tokens: int, length: int | None = None) -> Windows:
    """Return the first windows of the held-out data, at least one and at most `tokens` tokens.

    length: tokens of a window; None: as the first held-out batch. Longer batches are cut, the rest
    is dropped. Raises ValueError if no batch is so long.
    """
    found: list[tuple[Tensor, ...]] = []
    longest = wanted = 0
    for batch in data.eval_batches():
        longest, length = max(longest, len(batch[0])), length or len(batch[0])
        wanted = max(1, tokens // length)
        for parts in zip(*(side.split(length) for side in batch), strict=True):
            if len(parts[0]) == length:
                found += zip(*(part.unbind(1) for part in parts), strict=True)
        if len(found) >= wanted:
            break
    if not found:
        raise ValueError(f"the held-out data have windows of at most {longest} tokens")
    return Windows(*map(torch.stack, zip(*found[:wanted], strict=True)))


def log_probs(
    task: LanguageModel, windows: Windows, batch: int, pad: int = 0, *, own_format: bool = False
) -> Tensor:
    """Return each target's log-probability in the task's mode, float64 [windows, time], on the CPU.

    The forward pass runs in eval mode without gradients, each window from its start with no carried
    state. Weights are those of an evaluation: averages if the run has them.

    Args:
        batch: windows side by side.
        pad: tokens appended to each window. For the tokens before them, a causal model computes the
            same; only the shapes of its products change.
        own_format: let the mode decide the format of log-softmax (that of the logits; FP32 under
            autocast) in place of FP32. A sampled softmax is FP32.
    """
    time = windows.tokens.shape[1]
    rounds = own_format and task.policy.autocast_dtype is None
    dtype = None if rounds else torch.float32
    found = []
    learner = task.learner
    with learner.evaluating(in_mode=True, widens=not own_format) as model, task.forward_context:
        for sides in zip(*(side.split(batch) for side in windows), strict=True):
            tokens, targets = (F.pad(side, (0, pad)).t().contiguous() for side in sides)
            if task.sampled:
                values = -model(tokens, targets, None)[0]
            else:
                logits = model(tokens, None)[0]
                values = F.log_softmax(logits, -1, dtype=dtype)
                values = values.gather(-1, targets[..., None]).squeeze(-1)
            found.append(values[:time].t().double().cpu())
    return torch.cat(found)


def difference(a: Tensor, b: Tensor, band: float) -> Difference:
    """Compare `a` with `b`, floating point of one shape; computed in FP64."""
    a, b = a.double(), b.double()
    apart = a - b
    apart = apart[torch.isfinite(apart)]
    ratio = torch.expm1(apart)
    lost = a.numel() - apart.numel()
    return Difference(
        a.numel(),
        int((a != b).sum()),
        lost,
        rms=apart.square().mean().sqrt().item(),
        mean=apart.mean().item(),
        largest=apart.abs().max().item() if apart.numel() else float("nan"),
        ratio_rms=ratio.square().mean().sqrt().item(),
        outside=(int((ratio.abs() > band).sum()) + lost) / a.numel(),
    )


def by_position(a: Tensor, b: Tensor, band: float, bins: int = 8) -> dict[int, Difference]:
    """Return `difference` of consecutive parts of [windows, time], by last position (from 1)."""
    parts = zip(*(side.tensor_split(min(bins, side.shape[1]), 1) for side in (a, b)), strict=True)
    found, last = {}, 0
    for one, other in parts:
        last += one.shape[1]
        found[last] = difference(one, other, band)
    return found
