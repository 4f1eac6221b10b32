"""Which modules are measured, and to which of them a parameter belongs."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from mprun.errors import BadInput
from mprun.tasks import Learner

Chosen = dict[str, dict[str, nn.Module]]


def chosen_modules(learners: Mapping[str, Learner], patterns: Sequence[str]) -> Chosen:
    """Learner -> module name -> module; BadInput for a pattern that matches no module.

    patterns: glob patterns over module names, as in precision.overrides; each has to match in one
    of the models at least. None at all: every module that has no modules inside.
    """
    names = {
        label: {name: module for name, module in learner.model.named_modules() if name}
        for label, learner in learners.items()
    }
    if not patterns:
        return {
            label: {name: m for name, m in own.items() if not any(m.children())}
            for label, own in names.items()
        }
    everything = [name for own in names.values() for name in own]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in everything):
            close = get_close_matches(pattern, everything, n=3, cutoff=0.0)
            raise BadInput(
                f"numerics.modules={pattern}: matches no module; some modules: {', '.join(close)}"
            )
    return {
        label: {n: m for n, m in own.items() if any(fnmatchcase(n, p) for p in patterns)}
        for label, own in names.items()
    }


def owner(parameter: str, chosen: Mapping[str, nn.Module]) -> str | None:
    """The innermost chosen module around the parameter of this name, or None."""
    name = parameter
    while name:
        name = name.rpartition(".")[0]
        if name in chosen:
            return name
    return None
