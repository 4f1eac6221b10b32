"""The cost of `mprun.prepare` and `mprun.Run` over the plain script, as a ratio in one process.

    python -m benchmarks.script_overhead [--rounds N] [--width N] [--modes fp32,amp,...]

The model is a small LSTM language model, whose step takes about half a millisecond on one core:
every microsecond shows (`--width` makes it larger). Three loops take turns, some steps each, in
changing order: plain torch in FP32, the same script with prepared objects, and the same with a run
directory. In a 16-bit mode on a CPU the ratio to plain torch is mostly the emulation; in fp32 it is
only `prepare`. mprun's hooks for the whole process (optimizer steps, backward passes) are removed
from torch during the turns of the plain loop.

It prints the median of each round's ratio with its 95 % interval (order statistics, no assumption
on the distribution), and the ratio of the 20th percentiles, because other work only adds time.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as optim

import mprun

PLAIN_ENGINE = torch.autograd._engine_run_backward  # before mprun.prepare wraps it
STEPS = 25  # of a loop in a round
VOCABULARY, LENGTH, STREAMS = 128, 16, 4


class Words(nn.Module):
    """Embedding, LSTM, output layer."""

    width = 48

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, self.width)
        self.lstm = nn.LSTM(self.width, self.width)
        self.output = nn.Linear(self.width, VOCABULARY)

    def forward(self, tokens):
        return self.output(self.lstm(self.embedding(tokens))[0])


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Words(), torch.randint(VOCABULARY, (LENGTH + 1, STREAMS))


def plain() -> Callable[[], None]:
    """Return a step of the script without mprun."""
    model, tokens = model_and_batch()
    return script_step(model, torch.optim.SGD(model.parameters(), 0.1), tokens, None)


def script_step(model, optimizer, tokens, run) -> Callable[[], None]:
    """Return a step as the script has it, with or without mprun; recorded where there is a run."""

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens[:-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())
        loss.backward()
        optimizer.step()
        if run is not None:
            run.step(loss)

    return step


def prepared(mode: str, recorded: ExitStack | None) -> Callable[[], None]:
    """Return a step of a script, recorded in a separate folder until `recorded` is closed."""
    model, tokens = model_and_batch()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = mprun.prepare(model, inner, mode)
    run = None
    if recorded is not None:
        folder = recorded.enter_context(tempfile.TemporaryDirectory())
        run = recorded.enter_context(mprun.Run(folder, optimizer, config={}, seed=0))
    return script_step(model, optimizer, tokens, run)


@contextmanager
def without_hooks() -> Iterator[None]:
    """Remove mprun's hooks from torch."""
    hooks = (optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks)
    kept, engine = [dict(each) for each in hooks], torch.autograd._engine_run_backward
    for each in hooks:
        each.clear()
    torch.autograd._engine_run_backward = PLAIN_ENGINE
    try:
        yield
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)
        torch.autograd._engine_run_backward = engine


def seconds(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - started) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--modes", default="fp32,fp16_master_scaled,amp")
    parser.add_argument("--width", type=int, default=Words.width)
    options = parser.parse_args()
    Words.width = options.width
    torch.set_num_threads(1)
    for mode in options.modes.split(","):
        with ExitStack() as recorded:
            loops = {
                "plain": plain(),
                "prepared": prepared(mode, None),
                "prepared, Run": prepared(mode, recorded),
            }
            times: dict[str, list[float]] = {name: [] for name in loops}
            for number in range(options.rounds + 2):
                turns = [*loops.items()]
                for name, step in turns[:: 1 if number % 2 else -1]:
                    with without_hooks() if name == "plain" else nullcontext():
                        found = seconds(step)
                    if number >= 2:  # the first two warm up
                        times[name].append(found)
        base = times.pop("plain")
        fast = _fast(base)
        print(f"{mode}: plain FP32 {1e3 * fast:.3f} ms a step")
        for name, own in times.items():
            ratios = [mine / theirs for mine, theirs in zip(own, base, strict=True)]
            low, middle, high = median_interval(ratios)
            added = 1e6 * statistics.median(m - t for m, t in zip(own, base, strict=True))
            spread = f"rounds {middle:.3f} (95 % {low:.3f} to {high:.3f}), n = {len(ratios)}"
            print(f"  {name:<14} x {_fast(own) / fast:.3f}; {spread}; {added:+.0f} us")


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the ends of the median's 95 % interval around it.

    The number of n values below the median is binomial with 1/2: n / 2 -+ 0.98 sqrt(n).
    """
    ordered, count = sorted(values), len(values)
    below = max(0, int(count / 2 - 0.98 * count**0.5))
    return ordered[below], statistics.median(ordered), ordered[count - 1 - below]


def _fast(times: list[float]) -> float:
    return statistics.quantiles(times, n=5)[0]


if __name__ == "__main__":
    main()
