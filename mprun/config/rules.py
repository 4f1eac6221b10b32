"""Range and choice rules that live beside the configuration fields they guard.

A field declares its rule once, as metadata; `violations` walks a configuration and reports
every broken rule as one line that names the key, the value and what is allowed.
"""

import dataclasses
import math
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any


def ranged(default: Any, *, above=None, at_least=None, below=None, at_most=None) -> Any:
    """A number (or null, where the type allows it), finite and inside the given bounds."""
    bounds = {"above": above, "at_least": at_least, "below": below, "at_most": at_most}
    rule = {"bounds": {key: value for key, value in bounds.items() if value is not None}}
    return dataclasses.field(default=default, metadata=rule)


def one_of(default: Any, *choices: str) -> Any:
    """One of the given words (or null, where the type allows it)."""
    return dataclasses.field(default=default, metadata={"choices": choices})


def nearest(word: str, known) -> str:
    """`; did you mean 'x'?` for the closest known word, or nothing."""
    match = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""


def violations(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield one line for each value of the dataclass tree `config` that breaks its field's rule."""
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from violations(value, key + ".")
        elif value is not None:
            yield from _check(key, value, field.metadata)


def _check(key: str, value: Any, rule) -> Iterator[str]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _check(key, item, rule)
        return
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{key}={value}: must be a finite number"
        return
    if "choices" in rule and value not in rule["choices"]:
        choices = [str(choice) for choice in rule["choices"]]
        hint = nearest(str(value), choices)
        yield f"{key}={value}: must be one of {', '.join(choices)}{hint}"
    bounds = rule.get("bounds", {})
    broken = (
        ("above" in bounds and not value > bounds["above"])
        or ("at_least" in bounds and not value >= bounds["at_least"])
        or ("below" in bounds and not value < bounds["below"])
        or ("at_most" in bounds and not value <= bounds["at_most"])
    )
    if broken:
        words = {"above": ">", "at_least": ">=", "below": "<", "at_most": "<="}
        text = " and ".join(f"{words[name]} {bound:g}" for name, bound in bounds.items())
        yield f"{key}={value}: must be {text}"
