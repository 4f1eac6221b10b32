"""`mprun.sweep`: a user's training function in several precision modes and seeds, compared.

docs/script/notebook.md shows one. All runs are in this process, one after another: a function of a
notebook has no other.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from mprun.errors import needing, shortened
from mprun.precision.policy import get_policy
from mprun.prepared.prepare import Model, Opt, Options, prepare
from mprun.record.console import columns
from mprun.record.seed_plan import FEWEST, MOST, MOST_BY_DEFAULT, SeedPlan
from mprun.script.run import Run

if TYPE_CHECKING:
    from mprun.comparison.notebook import ComparedRuns

_BASELINE = "fp32"
_EVERY_S = 0.2  # between two updates of the progress


class SweptRun(Run):
    """A run of `mprun.sweep`: a `Run` that begins when `prepare` receives model and optimizer.

    Attributes:
        precision: the mode's name.
        seed: the seed, already set in the generators of Python, NumPy and torch.
    """

    status = "not prepared"

    def __init__(
        self,
        precision: str,
        seed: int,
        plan: SeedPlan | None,
        progress: _Progress,
        recorded: dict[str, Any],
    ):
        self.precision, self.seed, self._seed_plan = precision, seed, plan
        self._progress, self._recorded = progress, recorded

    def prepare(
        self, model: Model, optimizer: Opt, **options: Unpack[Options]
    ) -> tuple[Model, Opt]:
        """Put model and optimizer into the run's mode as `mprun.prepare` does, and begin the
        record."""
        if self.status != "not prepared":
            raise RuntimeError(
                "run.prepare: was called twice; call it once per run, with all "
                "models and optimizers"
            )
        prepared = prepare(model, optimizer, self.precision, **options)
        given: Any = optimizer
        try:
            super().__init__(optimizer=given, seed=self.seed, **self._recorded)
        except BaseException:
            self.status = "not prepared"
            raise
        return prepared

    def step(self, loss: Tensor | float, **metrics: Tensor | float) -> None:
        """Count the step that the function has just taken, as `Run.step` does."""
        super().step(loss, **metrics)
        self._progress.show(f"{self.precision}, seed {self.seed}: step {self.steps:,}")

    @property
    def final(self) -> dict[str, float]:
        """Return the metrics of the newest evaluation."""
        return self._final

    def __exit__(self, kind, error, traceback) -> bool:
        if self.status == "not prepared":
            return False
        return super().__exit__(kind, error, traceback)

    def _refuse_ended(self) -> None:
        if self.status == "not prepared":
            raise RuntimeError("run: call run.prepare(model, optimizer) before its first step")
        super()._refuse_ended()

    def _say(self, text: str) -> None:
        """Leave it to the progress."""


def sweep(
    train: Callable[[SweptRun], Any],
    modes: Iterable[str] = (_BASELINE, "amp"),
    seeds: int | Iterable[int] = 3,
    *,
    folder: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    data: str | Path | Iterable[Path] | None = None,
    metric: str = "loss",
    margin: float | None = None,
    higher_is_better: bool | None = None,
    pair_sd: float | None = None,
    pair_sd_source: str | None = None,
    log_every: int = 50,
    until: str | None = None,
    max_seeds: int | None = None,
) -> ComparedRuns:
    """Call `train(run)` for each mode and seed, record every run and compare the modes with FP32.

    Before each call, the random generators of Python, NumPy and torch are seeded with the run's
    seed. The function `train` builds a new model and optimizer, passes them to `run.prepare`, calls
    `run.step(loss)` after each step, and `run.evaluate(loss=...)` at its end. If a run diverges,
    the sweep records this result and continues. An error other than divergence ends the sweep.

    With `until="decided"` the sweep adds seeds in rounds. Each round adds one seed for FP32 and for
    each mode without a verdict, up to `max_seeds`. Before its training, each run records the
    numbers of seeds at which verdicts are computed. Because these numbers are fixed in advance, the
    error rate of the verdicts stays at 5 %.

    Args:
        train: the function; it may read `run.precision` and `run.seed`.
        modes: names of precision modes; FP32 must be among them, as the baseline.
        seeds: number of seeds (3 means the seeds 0, 1 and 2), or a list of seeds. With `until`,
            these are the seeds for the first verdict: at least 3 consecutive numbers.
        folder: parent of the run directories; None: outputs/ and the function's name.
        config: settings that affect the result, as for `mprun.Run`.
        data, metric, margin, higher_is_better, pair_sd, pair_sd_source, log_every: as for
            `mprun.Run`.
        until: "decided", or None to run all `seeds` of every mode.
        max_seeds: with `until`, largest number of seeds per mode, at most 50. None means 10.

    Returns:
        The comparison of these runs, with `verdicts`, `curves`, `figure()` and `write(folder)`. A
        notebook displays the returned object with its figures.

    Raises:
        ValueError: an argument is wrong, or `train` did not prepare or evaluate its run.
    """
    with needing("notebook"):  # now, not after hours
        from mprun.comparison import compare, equivalence  # noqa: F401  with scipy

    modes, seeds = _modes(modes), _seeds(seeds)
    plan = _planned(until, max_seeds, seeds, modes)
    name = getattr(train, "__name__", "train")
    recorded: dict[str, Any] = {
        "folder": Path("outputs") / name if folder is None else folder,
        "config": {**(config or {}), "function": _source_of(train)},
        "name": name,
    }
    recorded |= {"data": data, "metric": metric, "margin": margin, "log_every": log_every}
    recorded |= {"higher_is_better": higher_is_better}
    recorded |= {"pair_sd": pair_sd, "pair_sd_source": pair_sd_source}
    progress = _Progress()
    ended: dict[tuple[int, int], Path] = {}  # place of the mode, seed -> directory
    try:
        for cells in _rounds(modes, seeds, plan, ended, progress):
            progress.total += len(cells)
            for place, seed in cells:
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)  # of every device
                run = SweptRun(modes[place], seed, plan, progress, recorded)
                with run:
                    train(run)
                _check(run, name, metric)
                ended[place, seed] = run.directory
                progress.ended(run)
    finally:
        progress.close()
    return compare([*ended.values()])


def _rounds(
    modes: Sequence[str],
    seeds: Sequence[int],
    plan: SeedPlan | None,
    ended: Mapping[tuple[int, int], Path],
    progress: _Progress,
) -> Iterator[list[tuple[int, int]]]:
    """Yield place in `modes` and seed of the runs of each round; `ended` then has them."""
    if plan is None:
        yield [(place, seed) for seed in seeds for place in range(len(modes))]
        return
    from mprun.comparison.rounds import Rounds, SweptArm

    rounds = Rounds([SweptArm(mode, plan) for mode in modes])
    while cells := rounds.following():
        yield cells
        rounds.judge(ended)
        progress.say(rounds.news)


def _planned(
    until: str | None, most: int | None, seeds: Sequence[int], modes: Sequence[str]
) -> SeedPlan | None:
    """Return the plan of the looks; None: there is one test of all seeds."""
    if until is None and most is not None:
        raise ValueError(f"max_seeds={most}: is only allowed with until='decided'")
    if until is None:
        return None
    if until != "decided":
        raise ValueError(f"until={until!r}: must be 'decided', or None")
    if len(modes) < 2:
        raise ValueError(f"modes={[*modes]}: until='decided' needs a mode other than {_BASELINE}")
    first = len(seeds)
    if first < FEWEST or [*seeds] != [*range(seeds[0], seeds[0] + first)]:
        raise ValueError(
            f"seeds={[*seeds]}: with until='decided' pass at least {FEWEST} consecutive seeds, "
            "which the first verdict needs"
        )
    most = max(first, MOST_BY_DEFAULT) if most is None else most
    if type(most) is not int or not first <= most <= MOST:
        raise ValueError(f"max_seeds={most!r}: must be from {first} (seeds) to {MOST}")
    return SeedPlan(seeds[0], first, most)


def _modes(given: Iterable[str]) -> list[str]:
    modes = [given] if isinstance(given, str) else list(dict.fromkeys(given))
    for mode in modes:
        get_policy(mode)  # names those that there are
    if _BASELINE not in modes:
        raise ValueError(f"modes={modes}: must contain {_BASELINE}, the baseline of the comparison")
    return modes


def _seeds(given: int | Iterable[int]) -> list[int]:
    with suppress(TypeError):
        seeds = range(given) if isinstance(given, int) else map(operator.index, given)
        if (found := list(dict.fromkeys(seeds))) and 0 <= min(found) <= max(found) < 2**32:
            return found
    raise ValueError(f"seeds={given!r}: must be a number of seeds, or integers of at least 0")


def _source_of(train: Callable) -> str | None:
    """Return a digest of the function's text: an edited function is another experiment."""
    try:
        return hashlib.sha256(inspect.getsource(train).encode()).hexdigest()
    except (OSError, TypeError):
        return None


def _check(run: SweptRun, name: str, metric: str) -> None:
    """Raise ValueError unless the function did what a comparison needs."""
    if run.status == "not prepared":
        raise ValueError(f"{name}: the function ended without run.prepare(model, optimizer)")
    if run.status == "done" and not run.steps:
        raise ValueError(
            f"{name}: the function ended without run.step(loss) after each optimizer.step()"
        )
    if run.status == "done" and not run.final:
        raise ValueError(
            f"{name}: the function ended without run.evaluate({metric}=...), which the verdict "
            "needs"
        )


class _Progress:
    """A bar in a notebook and on a terminal, otherwise a line a run."""

    def __init__(self) -> None:
        self.total, self.done, self.shown, self.text = 0, 0, 0.0, ""
        self.terminal = sys.stderr.isatty()
        self.handle: Any = None
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if hasattr(shell, "kernel"):
            from IPython.display import display

            self.handle = display(self, display_id=True)

    def show(self, text: str) -> None:
        """Tell what is going on, at most every fifth of a second."""
        if time.monotonic() - self.shown >= _EVERY_S:
            self.shown = time.monotonic()
            self._draw(text)

    def ended(self, run: SweptRun) -> None:
        """Count a run."""
        self.done += 1
        values = "".join(f", {name} {value:.5g}" for name, value in run.final.items())
        text = f"{run.precision}, seed {run.seed}: {run.cause or run.status}{values}"
        self._draw(text)
        if self.handle is None and not self.terminal:
            print(f"{self.done} of {self.total} runs; {text}", file=sys.stderr, flush=True)

    def say(self, lines: Iterable[str]) -> None:
        """Print lines that stay, above the bar."""
        for line in lines:
            start = "\r\x1b[K" if self.terminal and self.handle is None else ""
            print(f"{start}{line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.terminal and self.handle is None:
            print(file=sys.stderr)

    def _draw(self, text: str) -> None:
        self.text = text
        if self.handle is not None:
            self.handle.update(self)
        elif self.terminal:
            filled = 20 * self.done // self.total
            bar = "━" * filled + "╌" * (20 - filled)
            line = f"{bar} {self.done} of {self.total} runs; {text}"
            line = shortened(line, columns(80, sys.stderr) - 1)
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def __repr__(self) -> str:
        return f"{self.done} of {self.total} runs; {self.text}"

    def _repr_html_(self) -> str:
        bar = f'<progress value="{self.done}" max="{self.total}"></progress>'
        return f"<div>{bar} {escape(repr(self))}</div>"
