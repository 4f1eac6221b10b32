"""The facts beside a configuration field: meaning, range, choices and role.

A field declares these once, as metadata. `violations` checks a configuration and reports every
broken rule as one line that names the key, the value and what is allowed.
"""

import dataclasses
import math
import operator
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, get_args, get_origin

from mprun.record.keys import READING, Role
from mprun.spelling import must_be

_FIRST = object()


def setting(default: Any, doc: str, **more: Any) -> Any:
    """Declare a field with `default`, a value or a function that returns one.

    Args:
        default: list and dict create a new object for each configuration.
        doc: the field's meaning in one line: unit, and the meaning of null or 0. A key's help and
            the documentation's page of keys show it.
        more: role: one of the roles in `mprun.record.keys`; default RESULT. path: the value names
            a file or a folder, so that a command line takes it as it is. restates: False if runs
            whose record lacks the key computed something else than its default says, or if every
            record has it. A record without the key then does not count as having the default.
    """
    metadata = {"doc": doc, **more}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def place(doc: str, *, unset: str = "", role: Role = READING) -> Any:
    """Declare the path of a file or a folder, by default null.

    One in a record is used only if the command names it too (mprun.config.trust). unset: another
    place outside of the run, for which null stands.
    """
    return setting(None, doc, role=role, place=True, path=True, unset=unset)


def below_root(doc: str) -> Any:
    """Declare the name of a file below `data.root`, by default null."""
    return setting(None, doc, below_root=True, path=True)


_BOUNDS = {
    "above": (">", operator.gt),
    "at_least": (">=", operator.ge),
    "below": ("<", operator.lt),
    "at_most": ("<=", operator.le),
}


def ranged(default: Any, doc: str, **more: Any) -> Any:
    """Declare a number or a list of them (or null, if the type allows it), finite and in bounds.

    doc, more: as for `setting`, and the bounds: above, at_least, below, at_most.
    """
    bounds = {name: more.pop(name) for name in _BOUNDS if name in more}
    return setting(default, doc, bounds=bounds, **more)


count = partial(ranged, at_least=1)  # a whole number from 1 on
share = partial(ranged, at_least=0.0, below=1.0)  # a number from 0 up to but not including 1
part = partial(ranged, at_least=0.0, at_most=1.0)
fraction = partial(ranged, above=0.0, below=1.0)
from_zero = partial(ranged, at_least=0.0)
positive = partial(ranged, above=0.0)


def one_of(choices: str | Collection, doc: str, default: Any = _FIRST, **more: Any) -> Any:
    """Declare one of the words of `choices`, or of its values (or null, if the type allows it).

    default: the first of them if not set. doc, more: as for `setting`.
    """
    known = tuple(choices.split()) if isinstance(choices, str) else choices
    first = next(iter(known), None)
    return setting(first if default is _FIRST else default, doc, choices=known, **more)


def is_label(text: str) -> bool:
    """Return whether a file name and a table can hold `text` as it is."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", text) is not None


def violations(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield one line for each value of the dataclass tree `config` that breaks its field's rule."""
    needed: Collection[str] = ()
    with suppress(LookupError):  # a file may name no component; its field is wrong then
        needed = getattr(getattr(config, "component", None), "needs", ())
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from violations(value, key + ".")
        elif value is not None:
            parts = (field.type, *get_args(field.type))
            if (
                reason := _wrong_container({get_origin(part) for part in parts}, value)
            ) is not None:
                yield f"{key}={value}: {reason}"
                continue
            null = type(None) in parts and field.name not in needed
            for item in value if isinstance(value, list) else [value]:
                if (reason := _broken(key, item, field.metadata, ["null"] * null)) is not None:
                    yield f"{key}={item}: {reason}"


def _wrong_container(kinds: Collection[Any], value: Any) -> str | None:
    """Return what OmegaConf does not check: an interpolation's value, and what a list holds."""
    for kind, what in ((list, "list"), (dict, "mapping")):
        if kind in kinds and not isinstance(value, kind):
            return f"must be a {what}"
    if isinstance(value, list) and any(isinstance(item, (list, dict)) for item in value):
        return "must hold neither lists nor mappings"
    return None


def _broken(key: str, value: Any, rule: Any, nulls: Iterable[str]) -> str | None:
    """Return what the value of `key` must be, if it is not; nulls: more choices."""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if "choices" in rule and value not in rule["choices"]:
        return must_be(str(value), [*map(str, rule["choices"]), *nulls], key)
    if "below_root" in rule and (os.path.isabs(value) or ".." in value.split(os.sep)):
        return "must be a path below data.root"
    bounds = rule.get("bounds", {})
    if all(_BOUNDS[name][1](value, bound) for name, bound in bounds.items()):
        return None
    return f"must be {allowed(bounds)}{meaning_of(rule['doc'])}"


def meaning_of(doc: str) -> str:
    """Return ` (momentum)`: the first part of a key's meaning, to stand behind its range."""
    first = doc[0] if doc[1:2].isupper() else doc[0].lower()
    return f" ({first}{doc[1:].partition(';')[0]})"


def allowed(bounds: Mapping[str, float]) -> str:
    """Return `>= 0 and < 1`: the bounds of a field, in the form of `ranged`."""
    return " and ".join(f"{_BOUNDS[name][0]} {_exact(bound)}" for name, bound in bounds.items())


def _exact(bound: float) -> str:
    mantissa, power = math.frexp(bound)
    if mantissa == 0.5 and abs(power - 1) > 20:
        return f"2^{power - 1}"
    return f"{bound:,}" if isinstance(bound, int) and bound >= 10_000 else f"{bound:g}"
