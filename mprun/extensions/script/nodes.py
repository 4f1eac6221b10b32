"""Casts and the loss scale as nodes of the autograd graph.

    FP32 parameter -> Node("weight"): rounds   [backward: widens, times 1/scale] -> model
    input          -> Node("in"): casts        [backward: widens, times 1/scale] -> model
    model          -> Node("out"): widens      [backward: times scale, rounds]   -> output

Between its nodes a model computes in its precision mode, with scaled gradients. Outside them
everything is plain torch: parameters are FP32 leaves with unscaled FP32 gradients, and a loss is
propagated by its `backward()`. A node is a `torch.autograd.Function`, because a tensor hook on a
view would be lost when the model writes into the view in place.

A backward pass on a CPU needs the emulation, as a forward pass does. The autograd engine gives each
node the thread state from the start of the pass, so no node can switch the emulation on. It is
entered around the engine's one entry, which `watch_backward` wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node as GraphNode

from mprun.precision.loss_scale import LossScale
from mprun.torch_private import (
    foreach_copy_,
    foreach_mul,
    graph_task,
    queue_callback,
    replace_engine,
    run_engine,
)

_MARK = "mprun.node"  # in the metadata of a node: (what, owner)


class Owner(Protocol):
    """The interface that nodes use of the prepared model that created them.

    Attributes:
        scale: scale of its gradients; None: they are not scaled.
    """

    scale: LossScale | None

    def on_output(self) -> None:
        """Note that a backward pass enters the model."""
        ...

    def on_input(self) -> None:
        """Note that a gradient leaves the model at its inputs."""
        ...


class Node(torch.autograd.Function):
    """Tensors on their way into a model ("in", "weight") or out of it ("out").

    Several tensors share a node if one launch shall cast them; their gradients then leave it
    together.
    """

    @staticmethod
    def forward(
        ctx: Any, owner: Owner, what: str, dtype: torch.dtype | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.owner, ctx.what, ctx.dtypes = owner, what, [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(_cast_all(tensors, dtype, copies=what == "in"))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        owner: Owner = ctx.owner
        if owner.scale is None:
            found = [
                gradient if gradient is None else gradient.to(dtype)
                for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
            ]
        elif ctx.what == "out":
            owner.on_output()
            factor = owner.scale.scale
            scaled = _times(gradients, factor, owner, "in")  # towards the model, see `_Factor`
            found = [
                gradient if gradient is None else gradient.to(dtype)
                for gradient, dtype in zip(scaled, ctx.dtypes, strict=True)
            ]
        else:
            wide = [
                gradient if gradient is None else gradient.to(dtype)
                for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
            ]
            found = _times(wide, owner.scale.inverse(), owner, "out")
            if ctx.what == "in":
                owner.on_input()
        return None, None, None, *found


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
    found: tuple[Tensor, ...] = Node.apply(owner, what, dtype, *tensors)
    for tensor in found:
        if tensor.grad_fn is not None:
            _marks(tensor.grad_fn)[_MARK] = (what, owner)
    return found


def _cast_all(
    tensors: Sequence[Tensor], dtype: torch.dtype | None, copies: bool
) -> Iterable[Tensor]:
    if dtype is not None and len(tensors) > 1 and tensors[0].is_cuda:
        made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        foreach_copy_(made, list(tensors))
        return made
    return [
        tensor.to(dtype)
        if dtype is not None and dtype is not tensor.dtype
        # torch takes a returned input for one that was written to, and the model may write to
        # its inputs.
        else (tensor.clone() if copies else tensor.detach())
        for tensor in tensors
    ]


def _times(
    gradients: Sequence[Tensor | None], factor: Tensor, owner: Owner, what: str
) -> list[Tensor | None]:
    """Multiply each by `factor` (float32, 0-dim), rounded once."""
    given = [gradient for gradient in gradients if gradient is not None]
    if torch.is_grad_enabled() and any(gradient.requires_grad for gradient in given):
        return [
            gradient if gradient is None else _factored(gradient, factor, owner, what)
            for gradient in gradients
        ]
    if len(given) > 1 and all(gradient.layout is torch.strided for gradient in given):
        products = iter(foreach_mul(given, factor))
    else:
        products = iter([gradient * factor for gradient in given])
    return [None if gradient is None else next(products) for gradient in gradients]


def _factored(gradient: Tensor, factor: Tensor, owner: Owner, what: str) -> Tensor:
    found: Tensor = _Factor.apply(gradient, factor)
    if found.grad_fn is not None:
        _marks(found.grad_fn)[_MARK] = (what, owner)
    return found


def refuse_leaks(roots: Iterable[Tensor]) -> None:
    """Raise RuntimeError if a path from `roots` enters a model, or leaves it to a leaf, past its
    nodes: gradients on that path would miss their scale or keep it.

    It costs about a microsecond for each node of the graph.
    """
    todo: list[tuple[Any, Owner | None]] = [(root.grad_fn, None) for root in roots]
    seen: set[tuple[GraphNode, int]] = set()
    while todo:
        node, inside = todo.pop()
        if node is None or (node, id(inside)) in seen:
            continue
        seen.add((node, id(inside)))
        what, owner = _marks(node).get(_MARK, (None, None))
        if what == "out":
            inside = owner
        elif inside is not None and inside.scale is not None and hasattr(node, "variable"):
            raise RuntimeError(
                "a tensor that requires gradients enters a prepared model past its inputs, so its "
                "gradient would be scaled; pass it to forward, or keep it in an attribute of a "
                "module"
            )
        elif what is not None:
            if inside is not owner and owner.scale is not None:
                raise RuntimeError(
                    "a tensor from inside a prepared model is a part of the loss, but none of "
                    "its outputs, so its gradient has no scale; return it from forward, or keep it "
                    "in an attribute of a module"
                )
            inside = None
        todo += [(before, inside) for before, _ in node.next_functions]


def _marks(node: GraphNode) -> dict[str, Any]:
    return node.metadata  # type: ignore[return-value]  # declared as a method, but a dictionary


def after_this_pass(act: Callable[[], None]) -> None:
    """Call `act` at the end of the backward pass that runs now.

    It is queued twice, to come after the callback in which DistributedDataParallel ends its
    reduction.
    """
    queue_callback(lambda: queue_callback(act))


def watch_backward(
    around: Callable[[Sequence[Tensor]], AbstractContextManager[Any] | None],
) -> None:
    """Let every backward pass of the process run in the context that `around(roots)` returns.

    A pass within a pass, from a recomputing checkpoint, runs in the context of the first. All
    passes of torch go through the one function wrapped here: `Tensor.backward`,
    `torch.autograd.grad`, checkpoints.
    """

    def run(roots: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        context = around(roots) if graph_task() == -1 else None
        if context is None:
            return run_engine(roots, *args, **kwargs)
        with context:
            return run_engine(roots, *args, **kwargs)

    replace_engine(run)


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return bool(graph_task() != -1)
