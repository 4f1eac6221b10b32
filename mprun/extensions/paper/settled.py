"""How the small rows were settled, before any run that is judged: settings.yaml.

A margin, a length or a rate that was chosen after a look at some seeds fits those seeds. So they
are chosen on development seeds, written down with date and reason, and judged on others.
"""

import hashlib
from collections.abc import Collection, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from mprun.comparison.wording import seeds_text
from mprun.errors import BadInput

_MOST = 10_000  # seeds of a span


class Settled(NamedTuple):
    """The settings of one row."""

    chosen: str  # the date
    seeds: tuple[int, ...]  # that were looked at
    metric: str  # that is judged
    margin: float  # `compare.margin`
    steps: int  # `train.steps`
    lr: float  # `optim.lr`
    seconds: float  # of a run: one core of a 2-core AMD EPYC, two runs side by side
    why: Mapping[str, str]  # the reason of margin, steps and lr

    def reasons(self, margin: str) -> str:
        """Return what was chosen and why; margin: as text, with its unit."""
        values = {"margin": margin, "steps": f"{self.steps}", "lr": f"{self.lr:g}"}
        told = "; ".join(f"{name} {value}: {self.why[name]}" for name, value in values.items())
        return f"chosen on {self.chosen} with seeds {seeds_text(self.seeds)}: {told}"


@cache
def settings() -> Mapping[str, Settled]:
    """Return key of a row -> its settings."""
    return {
        key: Settled(**own | {"chosen": str(own["chosen"]), "seeds": seeds_of(str(own["seeds"]))})
        for key, own in _content()["rows"].items()
    }


@cache
def held_out() -> tuple[int, ...]:
    """Return the seeds that rows are judged on unless others are asked for."""
    return seeds_of(_content()["held_out"])


@cache
def digest() -> str:
    """Return the first digits of the file's SHA-256, which every run of a row records."""
    return hashlib.sha256(_text().encode()).hexdigest()[:16]


@cache
def _content() -> Any:
    return yaml.safe_load(_text())


def _text() -> str:
    return files("mprun.extensions.paper").joinpath("settings.yaml").read_text(encoding="utf-8")


def seeds_of(text: str) -> tuple[int, ...]:
    """Return the seeds of "100-104,200", ascending; BadInput for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        ends = part.strip().split("-")
        if len(ends) > 2 or not all(end.isdecimal() for end in ends):
            raise BadInput(f"--seeds {text}: must be whole numbers and spans, such as 100-104,200")
        low, high = int(ends[0]), int(ends[-1])
        if not low <= high < low + _MOST:
            raise BadInput(f"--seeds {text}: {part.strip()} must ascend, by less than {_MOST:,}")
        found |= {*range(low, high + 1)}
    return tuple(sorted(found))


def told(keys: Collection[str], seeds: Collection[int]) -> str:
    """Say whether the settings of these rows were chosen on any of these seeds."""
    chosen = {seed for key in keys if key in settings() for seed in settings()[key].seeds}
    if met := chosen & {*seeds}:
        return (
            f"Seeds {seeds_text(met)} are among those that margins, lengths or rates were chosen "
            "on: these outcomes confirm nothing."
        )
    return (
        f"Seeds {seeds_text(seeds)}: no margin, length or rate was chosen on them, but on seeds "
        f"{seeds_text(chosen)} (mprun/extensions/paper/settings.yaml)."
    )
