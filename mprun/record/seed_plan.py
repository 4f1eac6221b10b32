"""The plan of a sweep that adds seeds until it has decided; it stands in each run's record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FEWEST, MOST = 3, 50  # seeds of a look
MOST_BY_DEFAULT = 10
KEY = "compare.plan"
FORM = f"[first seed, seeds of the first look (from {FEWEST}), most seeds (to {MOST})]"

# Words of a sweep alone, which are no keys -> what they mean.
SEED_WORDS = {
    "until": "decided: a sweep adds seeds, a round at a time, until each mode is decided",
    "max_seeds": "with until=decided: a mode gets at most so many seeds (10; at most 50)",
    "min_seeds": "with until=decided: the first look is at so many seeds (3)",
}


@dataclass(frozen=True, slots=True)
class SeedPlan:
    """Seeds from `seed` on, a look after each from `first` of them to `most`.

    The looks together have an error rate of 5 %: those at up to n seeds spend 5 % * (n / most)^1.5.
    """

    seed: int
    first: int
    most: int

    def __post_init__(self) -> None:
        if self.seed < 0 or not FEWEST <= self.first <= self.most <= MOST:
            raise ValueError(f"{KEY}={self.as_list()}: must be {FORM}")

    @classmethod
    def of(cls, given: Any) -> "SeedPlan | None":
        """Return the plan that a list states; None for None. ValueError for anything else."""
        if given is None:
            return None
        if not isinstance(given, list | tuple) or [type(part) for part in given] != [int] * 3:
            raise ValueError(f"{KEY}={given}: must be {FORM}")
        return cls(*given)

    @classmethod
    def of_keys(cls, keys: Mapping[str, Any]) -> "SeedPlan | None":
        """Return the plan of a flat configuration; None: it has none."""
        return cls.of(keys.get(KEY))

    def as_list(self) -> list[int]:
        """Return it as a record has it."""
        return [self.seed, self.first, self.most]

    @property
    def seeds(self) -> range:
        """Return all seeds that it may need, in their order."""
        return range(self.seed, self.seed + self.most)

    @property
    def looks(self) -> tuple[int, ...]:
        """Return the numbers of seeds at which it looks."""
        return tuple(range(self.first, self.most + 1))
