"""Casts and the loss scale as nodes of the autograd graph.

    FP32 parameter -> Node("weight"): rounds   [backward: widens, times 1/scale] -> model
    input          -> Node("in"): casts        [backward: widens, times 1/scale] -> model
    model          -> Node("out"): widens      [backward: times scale, rounds]   -> output

Between its nodes a model computes in its precision mode, with scaled gradients. Outside them
everything is plain torch: parameters are FP32 leaves with unscaled FP32 gradients, and a loss is
propagated by its `backward()`. A node is a `torch.autograd.Function`, because a tensor hook on a
view would be lost when the model writes into the view in place.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import Node as GraphNode

from mprun.precision.emulation import below_emulation
from mprun.precision.loss_scale import LossScale
from mprun.torch_private import (
    DisableTorchDispatch,
    DisableTorchFunction,
    foreach_copy_,
    foreach_mul,
    foreach_mul_,
    holders_of,
    run_engine,
)

_MARK = "mprun.node"  # in the metadata of a node, torch's too: (what, weakly its owner)


class Owner(Protocol):
    """The prepared model of a node.

    Attributes:
        scale: that of its gradients; None: they are not scaled.
        grad_dtype: dtype in which gradients of weights are unscaled; None: that of `.grad`.
    """

    scale: LossScale | None
    grad_dtype: torch.dtype | None

    def on_pass(self, what: str) -> None:
        """Note that a gradient passes one of its nodes."""

    def on_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Note what a pass adds to gradients of weights."""


class Node(torch.autograd.Function):
    """Tensors on their way into a model ("in", "weight") or out of it ("out").

    Several tensors share a node if one launch shall cast them; their gradients then leave it
    together.
    """

    @staticmethod
    def forward(
        ctx: Any, owner: Owner, what: str, dtype: torch.dtype | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        # Weak: no collection of garbage sees a circle through a graph, and a model keeps the nodes
        # of its weights, or an output in an attribute.
        ctx.owner, ctx.what, ctx.scale = weakref.ref(owner), what, owner.scale
        # Between its nodes a tensor is no leaf, whose dtype torch 2.11 does not tell.
        ctx.dtypes = [
            (one.grad_dtype or torch.float32) if one.is_leaf else one.dtype for one in tensors
        ]
        ctx.unscaled = ctx.dtypes
        if what == "weight" and owner.grad_dtype is not None:
            ctx.unscaled = [d if d.is_complex else owner.grad_dtype for d in ctx.dtypes]
        ctx.set_materialize_grads(False)
        return tuple(_cast_all(tensors, dtype, copies=what == "in"))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        owner: Owner | None = ctx.owner()  # None: the script has dropped model and optimizers
        scale = ctx.scale
        if owner is not None:
            owner.on_pass(ctx.what)
            scale = owner.scale
        with DisableTorchFunction(), below_emulation(gradients):
            counts = ctx.what == "weight" and ctx.scale is not None
            holders = _holders(gradients, ctx.unscaled) if counts else ()
            if scale is None:
                found = _to(gradients, ctx.unscaled)
            elif ctx.what == "out":
                # Towards the model, see `_Factor`.
                found = _to(_times(gradients, scale.scale, owner, "in"), ctx.dtypes)
            else:
                wide = _to(gradients, ctx.unscaled)
                inverse = scale.inverse()
                if not torch.is_grad_enabled() and _are_ours(wide, gradients, holders):
                    found = wide  # one pass over memory less than a copy of the copies
                    foreach_mul_([one for one in wide if one is not None], inverse)
                else:
                    found = _times(wide, inverse, owner, "out")
            if ctx.unscaled is not ctx.dtypes:
                found = _to(found, ctx.dtypes)
            if ctx.what == "weight" and owner is not None:
                owner.on_gradients(found)
        return None, None, None, *found


def _to(tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> Sequence[Tensor | None]:
    """Cast each to its dtype: on a GPU by one launch if nothing differentiates the casts."""
    pairs = [*zip(tensors, dtypes, strict=True)]
    cast = [(own, dtype) for own, dtype in pairs if own is not None and own.dtype is not dtype]
    dense = all(own.is_cuda and own.layout is torch.strided for own, _ in cast)
    made: Iterator[Tensor] = (own.to(dtype) for own, dtype in cast)
    if len(cast) > 1 and dense and not torch.is_grad_enabled():
        together = [torch.empty_like(own, dtype=dtype) for own, dtype in cast]
        foreach_copy_(together, [own for own, _ in cast])
        made = iter(together)
    return [own if own is None or own.dtype is dtype else next(made) for own, dtype in pairs]


def _are_ours(
    wide: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    holders: Sequence[tuple[int, ...] | None],
) -> bool:
    """Return whether nobody else can hold one of `wide`: each is a cast of a dense gradient, or a
    gradient that came here alone.

    holders: of each gradient, as `_holders` has counted on entry; none: nobody has.
    """
    alone = _alone()
    return any(one is not None for one in wide) and all(
        one is None or (one.layout is torch.strided if one is not gradient else count == alone)
        for one, gradient, count in zip_longest(wide, gradients, holders)
    )


def _holders(
    gradients: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]
) -> list[tuple[int, ...] | None]:
    """Count who holds each gradient; None where that would not tell (other classes), or where a
    cast to its dtype is to come."""
    return [
        holders_of(own) if _is_dense(own) and own.dtype is dtype else None
        for own, dtype in zip(gradients, dtypes, strict=True)
    ]


def _is_dense(own: Tensor | None) -> TypeGuard[Tensor]:
    return type(own) is Tensor and own.layout is torch.strided


class _Counted(torch.autograd.Function):
    """A tensor whose gradient, made by torch, only its own node holds; it is counted there."""

    @staticmethod
    def forward(ctx: Any, found: list[Any], tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.found = found
        return (tensor.detach(),)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.found += _holders(gradients, [torch.float32])
        return None, None


@functools.cache
def _alone() -> tuple[int, ...]:
    """Return the holders of a gradient that nobody holds but the node that it enters.

    Python and torch hold it, too, while they call the node; each version does it in its own way.
    """
    found: list[tuple[int, ...]] = []
    with torch.enable_grad(), DisableTorchFunction(), DisableTorchDispatch():
        product = _Counted.apply(found, torch.ones(2, requires_grad=True))[0] * 2
        run_engine((product,), (torch.ones(2),), False, False, (), accumulate_grad=True)
    return found[0]


class _Factor(torch.autograd.Function):
    """A gradient times the scale, or its inverse, in a pass that is itself differentiated.

    Its own gradient passes unchanged: the gradient that enters a second pass is already scaled, and
    weights divide it.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, factor: Tensor) -> Tensor:
        return gradient * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def make_nodes(
    owner: Owner, what: str, dtype: torch.dtype | None, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Pass `tensors` through one node.

    Args:
        what: "weight", "in" or "out".
        dtype: dtype of the results; None: that of each tensor.
    """
    try:
        found: tuple[Tensor, ...] = Node.apply(owner, what, dtype, *tensors)
    except RuntimeError as error:  # asking beforehand would cost more than the casts
        if "functorch" not in str(error):
            raise
        raise RuntimeError(
            "torch.func cannot transform a prepared model whose casts or loss scale are nodes of "
            "autograd; use torch.autograd.grad, or transform a copy from before mprun.prepare"
        ) from error
    mark(found[:1], what, owner)  # one node has made all
    return found


def mark(tensors: Iterable[Tensor], what: str, owner: Owner) -> None:
    """Let the nodes that made `tensors` count as nodes of `owner`, unless they already are some."""
    for tensor in tensors:
        if tensor.grad_fn is not None:
            _marks(tensor.grad_fn).setdefault(_MARK, (what, weakref.ref(owner)))


def leaves(node: GraphNode) -> bool:
    """Return whether a node takes an output out of a model, which widens it."""
    if isinstance(node, BackwardCFunction):
        return _is_output(node)
    # Of a call that is watched the cast is marked, too.
    casts = type(node).__name__.startswith("ToCopyBackward")
    return casts and any(one is not None and _is_output(one) for one, _ in node.next_functions)


def _is_output(node: GraphNode) -> bool:
    what: str = _marks(node).get(_MARK, ("",))[0]
    return what == "out"


def _cast_all(
    tensors: Sequence[Tensor], dtype: torch.dtype | None, copies: bool
) -> Iterable[Tensor]:
    # torch takes a returned input for one that was written to, and the model may write to its
    # inputs.
    for own, cast in zip(tensors, _to(tensors, [dtype or t.dtype for t in tensors]), strict=True):
        assert cast is not None
        yield cast if cast is not own else own.clone() if copies else own.detach()


def _times(
    gradients: Sequence[Tensor | None], factor: Tensor, owner: Owner | None, what: str
) -> list[Tensor | None]:
    """Multiply each by `factor` (float32, 0-dim), rounded once."""
    given = [gradient for gradient in gradients if gradient is not None]
    if torch.is_grad_enabled() and any(gradient.requires_grad for gradient in given):
        factored = [_Factor.apply(gradient, factor) for gradient in given]
        if owner is not None:
            mark(factored, what, owner)
        products = iter(factored)
    elif len(given) > 1 and all(gradient.layout is torch.strided for gradient in given):
        products = iter(foreach_mul(given, factor))
    else:
        products = iter([gradient * factor for gradient in given])
    return [None if gradient is None else next(products) for gradient in gradients]


Root = Tensor | GradientEdge


def reached(
    roots: Iterable[Root],
    owners: Iterable[Owner],
    leaves: Callable[[], Mapping[int, Owner]],
    are_enough: Callable[[Sequence[Owner]], bool],
) -> list[Owner]:
    """Return whose passes one from `roots` is: of the owners of nodes or leaves that it meets.

    It ends once it has met all of them, or enough, and costs 2 to 3 microseconds for each node
    before.

    Args:
        owners: those that matter.
        leaves: returns id of each parameter -> its owner.
        are_enough: whether the rest does not matter.
    """
    missing, found = {*owners}, list[Owner]()
    parameters: Mapping[int, Owner] | None = None
    for node, _, _, owner in _met(roots):
        if owner is None and (variable := getattr(node, "variable", None)) is not None:
            parameters = leaves() if parameters is None else parameters
            owner = parameters.get(id(variable))
        if owner in missing:
            missing.remove(owner)
            found.append(owner)
            if not missing or are_enough(found):
                break
    return found


def entered(roots: Iterable[Root]) -> dict[Owner, bool]:
    """Return the owner of each node that a pass from `roots` meets -> whether it trains that model:
    it meets a weight."""
    found: dict[Owner, bool] = {}
    for _, _, what, owner in _met(roots):
        if owner is not None:
            found[owner] = what == "weight" or found.get(owner, False)
    return found


def refuse_leaks(roots: Iterable[Root]) -> None:
    """Raise RuntimeError if a path from `roots` enters a model, or leaves it to a leaf, past its
    nodes: gradients on that path would miss their scale or keep it.
    """
    for node, inside, what, owner in _met(roots):
        if what == "out":
            continue
        if inside is not None and inside.scale is not None and hasattr(node, "variable"):
            raise RuntimeError(
                "a tensor that requires gradients enters a prepared model without being one of "
                "its inputs, so its gradient would be scaled. Pass this tensor to forward, or "
                "store this tensor in an attribute of a module"
            )
        if owner is not None and owner is not inside and owner.scale is not None:
            raise RuntimeError(
                "a tensor from inside a prepared model is used in the loss, but is not one of its "
                "outputs, so its gradient has no scale. Return this tensor from forward, or "
                "store this tensor in an attribute of a module"
            )


def refuse_recomputed(
    now: GraphNode | None, roots: Iterable[Root], owners: Iterable[Owner], variables: Callable
) -> None:
    """Raise RuntimeError if node `now`, inside a model, has computed `roots` from a parameter past
    its node, as a checkpoint of the script's own may: that gradient would keep its scale.

    variables: returns id of each parameter of an owner -> anything.
    """
    inside = {owner for _, what, owner in _up_to_nodes([now]) if what in ("in", "weight")}
    own = {key for owner in owners if owner in inside for key in variables(owner)}
    starts = (root.grad_fn if isinstance(root, Tensor) else root.node for root in roots)
    for node, _, _ in _up_to_nodes(starts if own else ()):
        if id(getattr(node, "variable", None)) in own:
            raise RuntimeError(
                "a function computes a part of a prepared model again in the backward pass and "
                "reads a parameter itself, whose gradient would be scaled. Use "
                "torch.utils.checkpoint, or let a module inside read the parameter"
            )


def _up_to_nodes(
    starts: Iterable[GraphNode | None],
) -> Iterator[tuple[GraphNode, str | None, Owner | None]]:
    """Yield each node that a pass meets up to the first ones of models, and what those are."""
    todo, seen = [*starts], set[GraphNode]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        what, own = _marks(node).get(_MARK, (None, None))
        yield node, what, own and own()
        todo += [before for before, _ in node.next_functions] if what is None else ()


def _met(roots: Iterable[Root]) -> Iterator[tuple[Any, Owner | None, str | None, Owner | None]]:
    """Yield each node that a pass from `roots` meets, the model that it has entered by then, and
    the mark of the node, if it has one: what it is, and its owner."""
    todo: list[tuple[Any, Owner | None]] = [
        (root.grad_fn if isinstance(root, Tensor) else root.node, None) for root in roots
    ]
    seen: set[tuple[GraphNode, int]] = set()
    while todo:
        node, inside = todo.pop()
        if node is None or (node, id(inside)) in seen:
            continue
        seen.add((node, id(inside)))
        what, own = _marks(node).get(_MARK, (None, None))
        owner = own and own()
        yield node, inside, what, owner
        inside = inside if owner is None else owner if what == "out" else None
        todo += [(before, inside) for before, _ in node.next_functions]


def _marks(node: GraphNode) -> dict[str, Any]:
    return node.metadata  # type: ignore[return-value]  # declared as a method, but a dictionary
