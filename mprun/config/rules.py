"""What stands beside a configuration field: its range, its choices, its readers and its role.

A field declares these once, as metadata; `violations` walks a configuration and reports every
broken rule as one line that names the key, the value and what is allowed.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_origin


@dataclass(frozen=True, slots=True)
class Role:
    """What another value of a key means, wherever runs are told apart.

    Attributes:
        hashed: It can change a number of the run: it is part of `config_hash`.
        resumable: A continuation of the run may have another value.
        compared: Runs that differ in it are different experiments, with no verdict on each other.
        told: It is in a run's path and in the rows of a sweep's table wherever it is given; else
            only where it is swept.
    """

    hashed: bool
    resumable: bool
    compared: bool
    told: bool


# What is learned, and how: of every field that says nothing else.
RESULT = Role(hashed=True, resumable=False, compared=True, told=True)
# For how long, and how often it is evaluated.
LENGTH = Role(hashed=True, resumable=True, compared=True, told=True)
# The runs of one experiment; it has a place of its own in paths and tables.
SEED = Role(hashed=True, resumable=False, compared=False, told=False)
# Where it is computed: another device rounds otherwise, but nothing else is asked for.
MACHINE = Role(hashed=True, resumable=False, compared=True, told=False)
# How data are reached, steps executed and records written: the same numbers at another speed.
READING = Role(hashed=False, resumable=True, compared=False, told=False)
# What the run is called and what is watched of it; what it has begun with holds to its end.
LABEL = Role(hashed=False, resumable=False, compared=False, told=False)


def ranged(
    default: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    **more: Any,
) -> Any:
    """A number or a list of them (or null, where the type allows it), finite and inside the bounds.

    more: as for `setting`.
    """
    bounds = {"above": above, "at_least": at_least, "below": below, "at_most": at_most}
    given = {key: value for key, value in bounds.items() if value is not None}
    return setting(default, bounds=given, **more)


def one_of(default: Any, *choices: Any, **more: Any) -> Any:
    """One of the given words (or null, where the type allows it); more: as for `setting`."""
    return setting(default, choices=choices, **more)


def setting(default: Any, **metadata: Any) -> Any:
    """A field with `default`, a value or a function that makes one.

    Args:
        default: list and dict are made anew for each configuration.
        metadata: role: one of the roles above; RESULT without. of: the rules (optimizers, kinds of
            loss scale) that read the field, for which it must be set unless `optional`.
    """
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def fields_of(schema: Any, rule: str | None = None, *, needed: bool = False) -> set[str]:
    """The fields of a schema that are of `rule` (None: of any), or those that it cannot lack."""
    return {
        field.name
        for field in dataclasses.fields(schema)
        if (rule in field.metadata.get("of", ()) if rule else "of" in field.metadata)
        and not (needed and field.metadata.get("optional"))
    }


def nearest(word: str, known: Iterable[str]) -> str:
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
            # OmegaConf does not look at what an interpolation puts in place of a container.
            kind = _container(field.type)
            if kind is not None and not isinstance(value, kind):
                yield f"{key}={value}: must be a {'mapping' if kind is dict else 'list'}"
                continue
            for item in value if isinstance(value, list) else [value]:
                reason = _broken(item, field.metadata)
                if reason is not None:
                    yield f"{key}={item}: must be {reason}"


def _container(annotation: Any) -> type | None:
    """list or dict, where a field is one; None of a plain value."""
    kinds = [get_origin(part) for part in (annotation, *get_args(annotation))]
    return next((kind for kind in (list, dict) if kind in kinds), None)


_BOUNDS = {
    "above": (">", lambda value, bound: value > bound),
    "at_least": (">=", lambda value, bound: value >= bound),
    "below": ("<", lambda value, bound: value < bound),
    "at_most": ("<=", lambda value, bound: value <= bound),
}


def _broken(value: Any, rule: Any) -> str | None:
    """What `value` must be and is not."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if "choices" in rule and value not in rule["choices"]:
        choices = [str(choice) for choice in rule["choices"]]
        return f"one of {', '.join(choices)}{nearest(str(value), choices)}"
    bounds = rule.get("bounds", {})
    if all(_BOUNDS[name][1](value, bound) for name, bound in bounds.items()):
        return None
    return " and ".join(f"{_BOUNDS[name][0]} {bound:g}" for name, bound in bounds.items())
