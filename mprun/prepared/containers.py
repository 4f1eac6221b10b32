"""Tensors in what a call is given and returns: in containers, and in objects of any class.

    {"ids": ids, "pixels": pixels}     tuples, lists, dictionaries, data classes, pytrees
    Data(x=x, edge_index=edges)        a graph of PyG, a BatchEncoding, a class of one's own
    Normal(loc, scale)                 a distribution

A container is built anew of the converted tensors. An object is copied as `copy.copy` does, and the
copy holds them: the script's own stays as it is, and what `forward` writes to it is on the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.torch_private import tree_map

_DEPTH = 5  # of objects within objects; who holds tensors deeper down is no batch
# What holds none for a call, however much hangs on it.
_OPAQUE: tuple[type, ...] = (str, bytes, int, float, complex, type(None), type, ModuleType)
_OPAQUE += (FunctionType, BuiltinFunctionType, MethodType)
_OPAQUE += (nn.Module, Optimizer, torch.Generator, torch.dtype, torch.device)


def each_tensor(tree: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Return `tree` with every tensor in it converted.

    Raises:
        RuntimeError: A tensor that needs conversion is in an object that cannot be copied.
    """
    if isinstance(tree, Tensor):
        return convert(tree)
    if type(tree) is tuple or type(tree) is list:
        return type(tree)([each_tensor(part, convert) for part in tree])
    if type(tree) is dict:
        return {key: each_tensor(part, convert) for key, part in tree.items()}
    if isinstance(tree, _OPAQUE):
        return tree
    return tree_map(lambda leaf: _converted(leaf, convert), tree)


def _converted(leaf: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return convert(leaf)
    changed = {}
    for tensor in {id(one): one for one in tensors_of(leaf)}.values():
        if (now := convert(tensor)) is not tensor:
            changed[id(tensor)] = now
    return _copied(leaf, changed, {}) if changed else leaf


def tensors_of(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in a container or an object, one as often as it is there."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, _OPAQUE):
        for part in (*_entries(value), *_attributes(value).values()):
            yield from tensors_of(part, depth - 1)


def _entries(value: Any) -> tuple[Any, ...]:
    if isinstance(value, dict):
        return tuple(value.values())
    return tuple(value) if isinstance(value, tuple | list) else ()


def _attributes(value: Any) -> dict[str, Any]:
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for own in slots for name in ([own] if isinstance(own, str) else own)]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    found.pop("__dict__", None)
    return {**found, **getattr(value, "__dict__", {})}


def _copied(value: Any, changed: Mapping[int, Tensor], copies: dict[int, Any]) -> Any:
    """Return a value with other tensors, a copy where it holds one of them.

    Args:
        changed: id of each such tensor -> the other one.
        copies: id of each value that was copied -> its copy; objects may hold each other.
    """
    if isinstance(value, Tensor):
        return changed.get(id(value), value)
    if id(value) in copies:
        return copies[id(value)]
    if not any(id(tensor) in changed for tensor in tensors_of(value)):
        return value
    if isinstance(value, tuple):
        entries = [_copied(part, changed, copies) for part in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    try:
        made = copies[id(value)] = copy.copy(value)
    except Exception as error:
        raise RuntimeError(
            "a prepared model casts the tensors that it takes and returns. But copy.copy fails for "
            f"a {type(value).__name__}, so tensors in this object would pass without a cast. Pass "
            "and return tensors, and build such an object outside the model"
        ) from error
    if isinstance(value, dict):
        for key, part in value.items():
            dict.__setitem__(made, key, _copied(part, changed, copies))
    elif isinstance(value, list):
        made[:] = [_copied(part, changed, copies) for part in value]
    for name, part in _attributes(made).items():  # some of which its class may have copied
        if (now := _copied(part, changed, copies)) is not part:
            object.__setattr__(made, name, now)
    return made
