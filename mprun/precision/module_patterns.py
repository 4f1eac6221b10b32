"""Glob patterns over module names, as `precision.overrides` and other settings take them."""

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn


def those_that_match(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The patterns that match a module of the model."""
    names = [name for name, _ in model.named_modules() if name]
    return [p for p in patterns if any(fnmatchcase(name, p) for name in names)]


def matching_modules(model: nn.Module, pattern: str, key: str) -> list[str]:
    """Names of the modules that `pattern` matches; ValueError, naming `key`, if there are none."""
    names = [name for name, _ in model.named_modules() if name]
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if not matched:
        close = get_close_matches(pattern, names, n=3, cutoff=0.0)
        raise ValueError(f"{key}: {pattern!r} matches no module; some modules: {', '.join(close)}")
    return matched


def matching_parameters(model: nn.Module, patterns: Iterable[str], key: str) -> set[str]:
    """Names of all parameters in the modules that match, and in what is inside these modules.

    Without any pattern all parameters. ValueError for a pattern that matches no module.
    """
    names = [name for name, _ in model.named_parameters()]
    patterns = list(patterns)
    if not patterns:
        return set(names)
    around = {f"{m}." for pattern in patterns for m in matching_modules(model, pattern, key)}
    return {name for name in names if any(name.startswith(prefix) for prefix in around)}
