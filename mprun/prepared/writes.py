"""Writes within a call, to parameters and buffers of which the call holds 16-bit stand-ins.

    k.mul_(0.999).add_(q, alpha=0.001)          a momentum network that follows inside `forward`
    w.copy_(w / w.norm(dim=1, keepdim=True))    a layer that keeps its weights normalised

Computed on stand-ins such a change would be rounded to 16 bits, and most of it lost. So what is
computed without gradients from stand-ins alone is computed from the FP32 tensors too, and a write
goes to these. The stand-in follows, as it would by its own write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mprun.torch_private import (
    OpOverload,
    OpOverloadPacket,
    storage_key,
    tree_leaves,
    tree_map,
)

_WIDE = "_mprun_wide"  # attribute of a tensor: the same in FP32, an alias where it is one
_DATA: Any = Tensor.data
_GET, _SET = _DATA.__get__, _DATA.__set__  # each access makes another object, all are equal
_ASSIGNS = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "matmul")
) | {"__setitem__"}
_CASTS = ("to", "half", "bfloat16", "float", "type", "type_as")
_TO_PYTHON = ("item", "tolist", "__bool__", "__float__", "__int__")
# Twice computed they would take other numbers; in place they are computed once.
_OPAQUE = (OpOverload, OpOverloadPacket)  # an operator of somebody may do anything beside
_RANDOM = ("rand", "dropout", "bernoulli", "normal", "poisson", "multinomial")


class Writes(TorchFunctionMode):
    """A mode in which writes to stand-ins are writes to what they stand for.

    It costs some 2 microseconds for each call of a torch function, so it is entered where a call
    is audited, or the model has written before.
    """

    def __init__(self, stand_ins: Iterable[tuple[Tensor, Tensor]]):
        super().__init__()
        self.stand_ins = [(inside, own) for inside, own in stand_ins if inside.dtype != own.dtype]
        self._inside = {storage_key(inside) for inside, _ in self.stand_ins}
        self.written: set[int] = set()  # memories of the tensors to which writes have gone

    def __enter__(self) -> Any:
        for inside, own in self.stand_ins:
            setattr(inside, _WIDE, own)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for inside, _ in self.stand_ins:
            delattr(inside, _WIDE)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = tensors_in((args, kwargs))
        if not any(hasattr(one, _WIDE) for one in used) or isinstance(func, _OPAQUE):
            return func(*args, **kwargs)
        if func == _GET:
            return self._data(args[0])
        if func == _SET:
            return self._replace(*args)
        differentiated = torch.is_grad_enabled() and any(one.requires_grad for one in used)
        if (targets := written_by(func, args, kwargs)) is None:
            return self._beside(func, args, kwargs, used, differentiated)
        if not differentiated:
            return self._write(func, targets, args, kwargs)
        found = func(*args, **kwargs)  # with its graph: an activation, say, into a codebook's data
        if all(self._stands_in(one) for one in targets) and not _is_random(func):
            self._follow(func, targets, args, kwargs)
            for one in targets:
                _GET(one).copy_(_GET(getattr(one, _WIDE)))
        else:
            _part(targets)
        return found

    def _stands_in(self, tensor: Tensor) -> bool:
        return hasattr(tensor, _WIDE) and storage_key(tensor) in self._inside

    def _data(self, tensor: Tensor) -> Tensor:
        alias: Tensor = _GET(tensor)
        if hasattr(tensor, _WIDE):
            setattr(alias, _WIDE, _GET(getattr(tensor, _WIDE)))
        return alias

    @torch.no_grad()
    def _replace(self, target: Tensor, value: Tensor) -> None:
        """Assign to `target.data`; torch counts no version."""
        own = getattr(target, _WIDE, None)
        if own is None or value.shape != own.shape:
            _SET(target, value)
            return
        self.written.add(storage_key(own))
        _GET(own).copy_(getattr(value, _WIDE, value))
        _SET(target, own.detach().to(target.dtype))
        self._inside.add(storage_key(target))

    @torch.no_grad()
    def _write(
        self, func: Callable[..., Any], targets: list[Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Write to the FP32 tensors, and let stand-ins follow; to all else as the mode does."""
        written = [one for one in targets if storage_key(one) in self._inside]
        if not written:
            _part(targets)
            return func(*args, **kwargs)
        outputs = self._follow(func, written, args, kwargs)
        for one in written:
            one.copy_(getattr(one, _WIDE))
        back = {id(getattr(one, _WIDE)): one for one in written}
        return tree_map(lambda one: back.get(id(one), one), outputs)

    @torch.no_grad()
    def _follow(
        self, func: Callable[..., Any], targets: list[Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Write to the FP32 tensors alone."""
        self.written.update(storage_key(getattr(one, _WIDE)) for one in targets)
        return func(*tree_map(_wide, args), **tree_map(_wide, kwargs))

    def _beside(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        used: Sequence[Tensor],
        differentiated: bool,
    ) -> Any:
        """Compute as the mode does, and beside it from the FP32 tensors, if from nothing else."""
        found, name = func(*args, **kwargs), getattr(func, "__name__", "")
        others = [one for one in used if not hasattr(one, _WIDE)]
        # A constant may take part; activations, which may have no graph either, and what tokens
        # pick of a table do not.
        alone = not others if differentiated else all(one.numel() == 1 for one in others)
        results = tensors_in(found)
        if not alone or _is_random(func):
            return found
        if name not in _TO_PYTHON and not any(one.is_floating_point() for one in results):
            return found
        with torch.no_grad():
            if name in _CASTS:  # of which the FP32 one needs none
                wide = _wide(args[0])
            else:
                wide = func(*tree_map(_wide, args), **tree_map(_wide, kwargs))
        if name in _TO_PYTHON:
            return wide
        for one, other in zip(results, tensors_in(wide), strict=True):
            if one is not other and other.dtype is torch.float32:
                setattr(one, _WIDE, other)
        return found


def wide_of(tensor: Tensor, otherwise: Tensor) -> Tensor:
    """Return what was computed in FP32 beside a tensor, if anything was."""
    found: Tensor = getattr(tensor, _WIDE, otherwise)
    return found


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree."""
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


def _is_random(func: Any) -> bool:
    return any(word in getattr(func, "__name__", "") for word in _RANDOM)


def _part(targets: Iterable[Tensor]) -> None:
    """Let tensors go their own way, without what was computed in FP32 beside them."""
    for one in targets:
        if hasattr(one, _WIDE):
            delattr(one, _WIDE)


def _wide(value: Any) -> Any:
    """Return the FP32 tensor of a stand-in, and any other 16-bit one widened."""
    if not isinstance(value, Tensor):
        return value
    if hasattr(value, _WIDE):
        return getattr(value, _WIDE)
    is_half = value.is_floating_point() and value.dtype.itemsize == 2
    return value.float() if is_half else value


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
    """Return the tensors that `func` writes to; None if it makes new ones."""
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None:
        return tensors_in(kwargs["out"])
    is_inplace = name.endswith("_") and not name.endswith("__")
    return tensors_in(args[:1]) if is_inplace or name in _ASSIGNS else None
