"""The words `until=decided max_seeds=10` of a sweep, and the configurations that they make."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mprun.config.overrides import without
from mprun.errors import BadInput
from mprun.record.keys import flat
from mprun.record.seed_plan import FEWEST, KEY, MOST, MOST_BY_DEFAULT, SEED_WORDS, SeedPlan

if TYPE_CHECKING:
    from mprun.config.compose import Composed


@dataclass(frozen=True, slots=True)
class UntilDecided:
    """The seeds that were asked for, whichever is the first of them."""

    first: int
    most: int

    def plan(self, seed: int) -> SeedPlan:
        """Return the plan that begins with a seed."""
        return SeedPlan(seed, self.first, self.most)

    def overrides(self, one: Sequence[str], seed: int) -> Iterator[tuple[str, ...]]:
        """Yield the overrides of a configuration with each seed that it may need."""
        plan = self.plan(seed)
        stated = f"{KEY}={plan.as_list()}".replace(" ", "")
        for own in plan.seeds:
            yield (*without(one, "seed"), f"seed={own}", stated)


def asked(words: dict[str, str]) -> UntilDecided | None:
    """Return what the words of a sweep's line ask for, checked; None: all of its seeds are named.

    words: as `split_seed_words` returns them.
    """
    if not words:
        return None
    if "until" not in words:
        key, value = next(iter(words.items()))
        raise BadInput(f"{key}={value}: is only allowed with until=decided")
    if words["until"] != "decided":
        raise BadInput(f"until={words['until']}: must be the word decided ({SEED_WORDS['until']})")
    first = _number(words, "min_seeds", FEWEST, FEWEST, MOST)
    most = _number(words, "max_seeds", max(first, MOST_BY_DEFAULT), first, MOST)
    return UntilDecided(first, most)


def _number(words: dict[str, str], key: str, default: int, low: int, high: int) -> int:
    text = words.get(key, str(default))
    if not (text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        because = f" ({'min_seeds' if 'min_seeds' in words else 'a verdict needs so many'})"
        raise BadInput(
            f"{key}={text}: must be a whole number from {low}{because * (low > 3)} to {high}"
        )
    return int(text)


def refuse_swept_seed(swept: Iterable[str]) -> None:
    """Raise BadInput if the line names several seeds."""
    if "seed" in swept:
        raise BadInput(
            "seed: must be one value with until=decided: the first seed. The sweep adds other seeds"
        )


def refuse_lone_modes(composed: Sequence["Composed"]) -> None:
    """Raise BadInput unless each configuration has its baseline and another mode."""
    # Here: it loads numpy.
    from mprun.comparison.grouping import BASELINE, canonical, is_no_key, of_arm

    found: dict[str, set[str]] = {}
    baselines: dict[str, str] = {}
    for one in composed:
        keys = flat(one.as_dict())
        shared = canonical({k: v for k, v in keys.items() if not (of_arm(k) or is_no_key(k))})
        own = canonical({k: v for k, v in keys.items() if of_arm(k)})
        found.setdefault(shared, set()).add(own)
        wanted = one.config.compare.baseline
        plain = wanted != BASELINE or one.config.scaler.kind == "none"
        if one.choices["precision"] == wanted and plain:
            baselines[shared] = wanted
    for shared, arms in found.items():
        if shared not in baselines:
            wanted = composed[0].config.compare.baseline
            raise BadInput(
                f"until=decided: the sweep has no run of the baseline; add {wanted} to precision= "
                f"(compare.baseline={wanted}){', without scaler=' * (wanted == BASELINE)}"
            )
        if len(arms) < 2:
            raise BadInput(
                "until=decided: needs a mode other than the baseline, such as "
                f"precision={baselines[shared]},amp"
            )
