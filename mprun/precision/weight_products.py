"""Products with a module's own parameters inside its `forward`, cast as those of linear layers.

    F.linear(x, self.weight)    x @ self.weight    torch.bmm    torch.einsum    F.grouped_mm

A parameter is one weight, or one for each expert, [experts, out, in] or [experts, in, out]. Each
matrix that a product takes of it is a linear layer of its own: with scales of its own, and of the
rows that meet it. So it has the bits of an `nn.Linear` for each expert.

A mode of functions follows a parameter through views, up to the product. A weight that `forward`
itself casts to another dtype is followed no further: that product is as it is written.
"""

from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mprun.torch_private import base_of_view, grouped_mm, storage_key

# The product of a linear layer: x [..., in], weight [out, in], bias; and what `delayed_scaling`
# keeps of this matrix of the parameter.
Multiply = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
# Attribute of a module: name of a parameter -> the latter, of each of its matrices.
KEPT_OF_WEIGHTS = "_mprun_kept_of_weights"

_NAMES = """transpose t permute swapaxes swapdims movedim adjoint select narrow index_select unbind
chunk split squeeze unsqueeze flatten unflatten reshape detach"""
_METHODS = "view expand contiguous to type_as __getitem__ __iter__"
_VIEWS = frozenset(
    [getattr(torch, name) for name in _NAMES.split()]
    + [getattr(Tensor, name) for name in f"{_NAMES} {_METHODS}".split()]
    + [getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")]
)
_TURNS = frozenset([Tensor.transpose, torch.transpose, getattr(Tensor, "mT").__get__])  # noqa: B009
# Products of two operands, and those to which a first one is added.
_PAIRS: dict[Any, tuple[str, str]] = {
    torch.matmul: ("input", "other"),
    torch.mm: ("input", "mat2"),
    torch.bmm: ("input", "mat2"),
    Tensor.matmul: ("self", "other"),
    Tensor.__matmul__: ("self", "other"),
    Tensor.mm: ("self", "mat2"),
    Tensor.bmm: ("self", "mat2"),
}
_ADDED: dict[Any, tuple[str, str, str]] = {
    torch.addmm: ("input", "mat1", "mat2"),
    torch.baddbmm: ("input", "batch1", "batch2"),
    Tensor.addmm: ("self", "mat1", "mat2"),
    Tensor.baddbmm: ("self", "batch1", "batch2"),
}


# What is kept, name of the parameter, input, weight and result of each product of such a mode.
Observer = Callable[[Tensor | None, str, Tensor, Tensor, Tensor], None]
observer: Observer | None = None


class _Weight(NamedTuple):
    """A tensor that was made of a parameter.

    base: the parameter, or a copy of it with as many matrices. kept: see `KEPT_OF_WEIGHTS`. whole,
    experts: of one that a tensor of numbers has picked, [n, ...], what it was picked from.
    """

    multiply: Multiply
    base: Tensor
    kept: Sequence[Tensor] | None = None
    whole: Tensor | None = None
    experts: Tensor | None = None

    @property
    def is_numbered(self) -> bool:
        """Return whether each of its matrices has numbers of its own."""
        return self.kept is not None and len(self.kept) > 1

    def times(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, at: int = 0) -> Tensor:
        """Multiply by a matrix of the parameter; at: its number, if it is a copy."""
        if self.kept is None:
            return self.multiply(x, weight, bias, None)
        if self.is_numbered and _share_memory(weight, self.base):
            offset = weight.storage_offset() - self.base.storage_offset()
            at = int(offset // self.base.stride(0))
        return self.multiply(x, weight, bias, self.kept[at])


def with_weights(
    forward: Callable[..., Any],
    weights: Sequence[tuple[nn.Module, str, Multiply]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `forward`, in which products with these parameters are computed by their `Multiply`."""
    known = {}
    for owner, name, multiply in weights:
        if (own := getattr(owner, name, None)) is not None:
            kept = getattr(owner, KEPT_OF_WEIGHTS, {}).get(name)
            known[own] = _Weight(multiply, own, kept)
    with _Products(known):
        return forward(*args, **kwargs)


def noting(
    unmet: dict[str, float],
    name: str,
    multiply: Multiply,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
) -> Tensor:
    """Multiply, and note that a product has met the parameter `name`."""
    found = multiply(x, weight, bias, kept)
    if not is_dynamo_compiling():
        unmet.pop(name, None)
        if observer is not None:
            observer(kept, name, x, weight, found)
    return found


class _Products(TorchFunctionMode):
    def __init__(self, known: dict[Tensor, _Weight]):
        super().__init__()
        self._known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The tensor first: a compiler guards what it finds of methods in a set, wrongly for some.
        own = self._of(args[0]) if args else None
        if own is not None and func in _VIEWS:
            return self._seen(own, func, args, kwargs)
        found = None
        if func is F.linear:
            found = self._linear(*_named(("input", "weight", "bias"), args, kwargs))
        elif func in _PAIRS:
            found = self._matmul(*_named(_PAIRS[func], args, kwargs))
        elif func is Tensor.__rmatmul__:
            found = self._matmul(args[1], args[0])
        elif func in _ADDED:
            added, *pair = _named(_ADDED[func], args, kwargs)
            found = self._matmul(*pair)
            found = None if found is None else added + found
        elif func is torch.einsum:
            found = self._einsum(*args, **kwargs)
        elif func is grouped_mm:  # F.grouped_mm calls it
            found = self._grouped(*args, **kwargs)
        return func(*args, **kwargs) if found is None else found

    def _of(self, tensor: Any) -> _Weight | None:
        if not isinstance(tensor, Tensor):
            return None
        if (own := self._known.get(tensor)) is not None:
            return own
        # A compiler does not show `.mT` to a mode.
        base = base_of_view(tensor)
        return None if base is None else self._known.get(base)

    def _seen(self, own: _Weight, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow a weight through a view."""
        weight, found = args[0], func(*args, **kwargs)
        is_several = not isinstance(found, Tensor)
        experts = None
        if func is Tensor.__getitem__:
            experts = args[1]
        elif func in (torch.index_select, Tensor.index_select):
            _, dim, experts = _named(("input", "dim", "index"), args, kwargs)
            experts = experts if dim == 0 else None
        if weight.dim() == 3 and own.experts is None and _are_numbers(experts):
            own = own._replace(whole=weight, experts=experts)
        elif own.experts is not None and func is not Tensor.contiguous:
            if func not in _TURNS or found.shape[0] != weight.shape[0]:
                return found  # some of the copies, which have no bits of an expert's layer
            own = own._replace(whole=func(own.whole, *args[1:], **kwargs))
        elif own.is_numbered and not is_several and len(found) == len(own.base):
            own = own if _share_memory(found, own.base) else own._replace(base=found)
        parts = [*found] if is_several else [found]
        for part in parts:
            if part.dtype is weight.dtype:
                self._known[part] = own
        return iter(parts) if func is Tensor.__iter__ else found

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        own = self._of(weight)
        if own is None or weight.dim() != 2:
            return None
        return own.times(x, weight, bias)

    def _matmul(self, left: Any, right: Any) -> Tensor | None:
        own, other = self._of(left), self._of(right)
        if (own is None) == (other is None):  # of two weights none is an input
            return None
        if other is not None:
            return _times(other, left, right.mT, turned=True) if right.dim() in (2, 3) else None
        if left.dim() not in (2, 3):
            return None
        # weight @ x is (x.T @ weight.T).T
        assert own is not None
        found = _times(own, right if right.dim() == 1 else right.mT, left)
        return found if found is None or right.dim() == 1 else found.mT

    def _grouped(
        self, a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor | None:  # fmt: skip
        own, other = self._of(a), self._of(b)
        if (own is None) == (other is None) or bias is not None:
            return None
        if offs is None:
            found = self._matmul(a, b)
        elif other is not None:
            found = _in_groups(other, a, b.mT, offs) if b.dim() == 3 else None
        else:
            assert own is not None
            found = _in_groups(own, b.mT, a, offs).mT if a.dim() == 3 else None
        return found if found is None or out_dtype is None else found.to(out_dtype)

    def _einsum(self, equation: Any, *operands: Any) -> Tensor | None:
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = tuple(operands[0])
        if not isinstance(equation, str) or len(operands) != 2:
            return None
        owns = [self._of(own) for own in operands]
        if (owns[0] is None) == (owns[1] is None):
            return None
        at = 0 if owns[1] is None else 1
        own, weight, x = owns[at], operands[at], operands[1 - at]
        if (labels := _labels(equation, at, x.dim())) is None:
            return None
        of_weight, of_x, output = labels
        both = [c for c in of_weight if c in of_x and c in output]
        summed = [c for c in of_weight if c in of_x and c not in output]
        outs, rows = (
            [c for c in a if c not in b] for a, b in ((of_weight, of_x), (of_x, of_weight))
        )
        if own is None or own.experts is not None:
            return None
        if not (summed and outs and {*both, *outs, *rows} == {*output}):
            return None
        sizes = dict(zip(of_weight, weight.shape, strict=True))
        if any(x.size(of_x.index(c)) != sizes[c] for c in (*both, *summed)):
            return None
        sizes |= dict(zip(of_x, x.shape, strict=True))
        lead = [_product_of(sizes, both)] if both else []
        down, across, along = (_product_of(sizes, part) for part in (outs, rows, summed))
        matrices = weight.permute([of_weight.index(c) for c in (*both, *outs, *summed)])
        given = x.permute([of_x.index(c) for c in (*both, *rows, *summed)])
        found = _times(
            own, given.reshape(*lead, across, along), matrices.reshape(*lead, down, along)
        )
        if found is None:
            return None
        made = [*both, *rows, *outs]
        found = found.reshape([sizes[c] for c in made])
        return found.permute([made.index(c) for c in output])


def _product_of(sizes: dict[str, int], labels: Sequence[str]) -> int:
    found = 1
    for label in labels:
        found *= sizes[label]
    return found


def _labels(equation: str, at: int, dims: int) -> tuple[str, str, str] | None:
    """Return the labels of the weight, which is operand `at`, of the other operand and of the
    result; None if one of them repeats, or the weight has an ellipsis."""
    given, arrow, output = equation.replace(" ", "").partition("->")
    first, _, second = given.partition(",")
    of_weight, of_x = (first, second) if at == 0 else (second, first)
    free = [c for c in ascii_letters if c not in equation]
    more = "".join(free[: dims + 3 - len(of_x)]) if "..." in of_x else ""
    if not arrow:
        single = [c for c in sorted({*given} - {*".,"}) if given.count(c) == 1]
        output = ("..." if more else "") + "".join(single)
    of_x, output = of_x.replace("...", more), output.replace("...", more)
    if any(len({*own}) != len(own) or "." in own for own in (of_weight, of_x, output)):
        return None
    return of_weight, of_x, output


def _named(names: Sequence[str], args: Sequence[Any], kwargs: Any) -> list[Any]:
    """Return arguments in the order of their names; those that are not given last are left out."""
    return [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether both are views of one memory; a compiler's graph breaks here."""
    return storage_key(one) == storage_key(other)


def _are_numbers(index: Any) -> bool:
    """Return whether an index picks an expert for each row: integers in one dimension."""
    is_tensor = isinstance(index, Tensor) and index.dim() == 1
    return is_tensor and not (index.is_floating_point() or index.dtype is torch.bool)


def _times(own: _Weight, x: Tensor, weight: Tensor, turned: bool = False) -> Tensor | None:
    """Compute x @ weight.mT for a weight [out, in] or [experts, out, in]; x as for torch.matmul.

    turned: the weight is the transposed one of `own`.
    """
    if weight.dim() == 2:
        return own.times(x, weight)
    if own.experts is not None:
        return _picked(own, x, turned)
    if len(weight) == 1 or x.dim() < 3:
        parts = [own.times(x, one, at=at) for at, one in enumerate(weight.unbind(0))]
        return parts[0] if x.dim() > 2 else torch.stack(parts)
    if x.size(-3) not in (1, len(weight)):
        return None
    rows = x.unbind(-3) if x.size(-3) > 1 else [x.select(-3, 0)] * len(weight)
    pairs = zip(rows, weight.unbind(0), strict=True)
    return torch.stack([own.times(row, one, at=at) for at, (row, one) in enumerate(pairs)], -3)


def _in_groups(own: _Weight, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows by the weight [out, in] of their expert, whose last row is before its end.

    It waits for the device, which alone knows the ends.
    """
    last, found = 0, []
    for at, (end, one) in enumerate(zip(ends.tolist(), weight.unbind(0), strict=True)):
        found.append(own.times(x[last:end], one, at=at))
        last = end
    found.append(found[0].new_zeros(len(x) - last, *found[0].shape[1:]))
    return torch.cat(found)


def _picked(own: _Weight, x: Tensor, turned: bool) -> Tensor | None:
    """Multiply each x[n] by a copy of its expert's weight: the rows of an expert together."""
    whole, experts = own.whole, own.experts
    assert whole is not None and experts is not None
    if x.dim() != 3 or len(x) != len(experts):
        return None
    experts = experts % len(whole)  # -1 is the last one
    order = experts.argsort(stable=True)
    ends = torch.bincount(experts, minlength=len(whole)).cumsum(0)
    found = _in_groups(own, x[order], whole.mT if turned else whole, ends)
    return found[order.argsort()]
