"""Copies of a prepared model: those that leave the process are plain ones in FP32.

    torch.save, pickle      `plain_state` of each module; it loads where mprun is not installed
    copy.deepcopy           `prepared_copy`: a plain copy, which is prepared again; of a module
                            whose class copies itself `own_copy`

Without masters weights are 16-bit in the process, and widened on their way out.
"""

from __future__ import annotations

import copy
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from mprun.prepared.border import OWN, Forward
from mprun.torch_private import FLAT_WEIGHTS, PLACES, version_of


def plain_state(forward: Forward) -> dict[str, Any]:
    """Return the state of its module as a plain one has it, always in FP32."""
    kind: Any = type(forward.module)
    state = {k: v for k, v in kind.__getstate__(forward.module).items() if k not in OWN}
    if forward.plain is not None:
        state["forward"] = forward.plain
    if not forward.shared.stores_half:
        return state

    wide = partial(_wide, forward)
    state |= {name: {k: wide(own) for k, own in state[name].items()} for name in PLACES}
    if FLAT_WEIGHTS in state:
        state[FLAT_WEIGHTS] = [wide(own) for own in state[FLAT_WEIGHTS]]
    return state


def own_copy(forward: Forward, memo: dict[int, Any]) -> nn.Module:
    """Return the copy that the class of its module makes, which takes all of its attributes.

    torch's parametrizations and graph modules copy themselves. memo: as of `copy.deepcopy`.
    """
    module = forward.module
    taken = {name: module.__dict__.pop(name) for name in OWN if name in module.__dict__}
    if forward.plain is not None:
        module.__dict__["forward"] = forward.plain
    if forward.shared.stores_half:
        for own in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            if (wide := _wide(forward, own)) is not own:
                memo[id(own)] = copy.deepcopy(wide, memo)
    try:
        return copy.deepcopy(module, memo)
    finally:
        module.__dict__.pop("forward", None)
        module.__dict__.update(taken)


def _wide(forward: Forward, own: Any) -> Any:
    """Return a 16-bit tensor of a module in FP32, anything else as it is."""
    is_half = isinstance(own, Tensor) and own.dtype is forward.shared.policy.param_dtype
    return _widened(own) if is_half else own


# Id and version of a 16-bit tensor -> the same in FP32, while a copy is made: a pickle, or the memo
# of `copy.deepcopy`, holds it until then.
_forms: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()


def _widened(own: Tensor) -> Tensor:
    """Return a 16-bit tensor in FP32, one tensor for all modules and places that hold it."""
    key = id(own), version_of(own)
    form = _forms.get(key)
    if form is None:
        form = own.detach().float()
        if isinstance(own, nn.Parameter):
            form = nn.Parameter(form, own.requires_grad)
        _forms[key] = form
    return form


def plain_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of a model as it is without a mode, with its weights in FP32.

    memo: as of `copy.deepcopy`.
    """
    kind, memo = type(model), {} if memo is None else memo
    if hasattr(kind, "__deepcopy__"):
        return own_copy(model.__dict__["forward"], memo)
    made = memo[id(model)] = kind.__new__(kind)
    made.__setstate__(copy.deepcopy(model.__getstate__(), memo))
    return made


def prepared_copy(own: Any, root: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of what a `PreparedModel` holds, prepared as it is.

    Args:
        own: the `PreparedModel`.
        root: the module that is copied: its model, or one of several that share something, whose
            copies share it too.
        memo: as of `copy.deepcopy`.
    """
    if id(own.model) in memo:
        return plain_copy(root, memo)
    if own.is_sharded:
        raise RuntimeError(
            "a prepared model must not be copied after its weights are sharded (fully_shard), "
            "because torch cannot copy shards; copy it before fully_shard"
        )
    if own.state == Forward.IN_MODE:
        raise RuntimeError(
            "a prepared model must not be copied during its own call, because it then contains "
            "16-bit copies of its weights; copy it between two calls"
        )
    made = plain_copy(own.model, memo)
    other = type(own)(
        made,
        own.forward_context,
        own.loss_scale,
        own.overrides,
        of_run=own.of_run,
        key=own.key,
        seed=own.seed,
    )
    if own.delayed is not None and other.delayed is not None:
        other.delayed.take_over(own.delayed.state_dict())
    found: nn.Module = memo[id(root)]
    return found
