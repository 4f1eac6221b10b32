"""Backward passes of a script: what those of prepared models need, and what follows at their end.

torch has one entry for all passes, and they go through `run_pass` here. A pass is a model's own if
it meets one of the model's nodes or parameters (nodes.py); others run as if there were no model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mprun.extensions.script.nodes import Root, reached, refuse_leaks
from mprun.extensions.script.scaling import Scaling, check_finite
from mprun.extensions.script.shards import are_several
from mprun.precision.emulation import HalfEmulation
from mprun.torch_private import (
    DisableTorchFunction,
    dispatch_modes,
    graph_task,
    queue_callback,
    run_engine,
)

if TYPE_CHECKING:
    from mprun.extensions.script.prepared_model import PreparedModel

# All prepared models; those whose passes a CPU emulates; those whose next pass is audited.
alive: weakref.WeakSet[PreparedModel] = weakref.WeakSet()
emulating: weakref.WeakSet[PreparedModel] = weakref.WeakSet()
due: weakref.WeakSet[PreparedModel] = weakref.WeakSet()


class Passes:
    """The passes of this process.

    Attributes:
        number: how many have begun.
        fed: number of the newest in which a gradient has left a model at its inputs.
    """

    number = fed = 0
    task = -1  # the pass that runs now, as torch counts
    entered: list[PreparedModel] = []  # by the gradients of that pass that they scale
    met: set[PreparedModel] = set()  # by any gradient since no pass ran


def on_pass(model: PreparedModel, what: str) -> None:
    """Hear that a gradient of the pass that runs now goes through a node of `model`."""
    Passes.met.add(model)
    if model.scale is None:
        return
    if what == "in":
        model.fed = Passes.fed = Passes.number
    elif what == "out":
        _enter(model)


def _enter(model: PreparedModel) -> None:
    task = graph_task()
    if task != Passes.task:
        Passes.task, Passes.entered = task, []
        # Twice, to come after the callback in which DistributedDataParallel ends its reduction.
        queue_callback(lambda: queue_callback(_end_pass))
    if model in Passes.entered:
        return
    Passes.entered.append(model)
    if model.has_gradients and all(own.grad is None for own in model.seen):
        # Gradients were cleared without a step. A script that only steps if they are finite would
        # never let the scale move.
        Scaling.of(model.loss_scale).end_without_step(model.found_inf)
    model.has_gradients = True


@torch.no_grad()
def _end_pass() -> None:
    """Look at the gradients once, before the script can change them; nothing waits."""
    with DisableTorchFunction():  # an emulation would look at each access
        for model in Passes.entered:
            model.partners.update(Passes.entered)
            model.found_inf.zero_()
            model.seen = model.parameters()
            check_finite(model.seen, model.found_inf)
            if are_several():  # shards have none before those of several passes are added up
                model.has_gradients = any(own.grad is not None for own in model.seen)
            for steps in [*model.updated_by]:
                steps.look_at(model)
    Passes.task, Passes.entered = -1, []


def run_pass(roots: Sequence[Root], *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass, in the arithmetic of the models whose pass it is."""
    Passes.number += 1
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    # Products of models in other modes would count for the one that is watched.
    those = alive if due or autocast else emulating
    try:
        with _in_arithmetic(roots, [*those]) if those else nullcontext():
            return run_engine(roots, *args, **kwargs)
    finally:
        if graph_task() == -1:  # a checkpoint's pass within a pass goes on with the same weights
            while Passes.met:
                Passes.met.pop().tensors.forget()


@contextmanager
def _in_arithmetic(roots: Sequence[Root], those: Sequence[PreparedModel]) -> Iterator[None]:
    """Emulate and watch, as those models need it whose pass begins at `roots`.

    A CPU needs the emulation as in a forward pass. The engine gives each node the thread state from
    the start of the pass, so no node can switch it on.
    """
    models: list[Any] = reached(roots, {k: one for one in those for k in one.tensors.dtypes()})
    watched = [model for model in models if model in due]
    due.difference_update(watched)
    if any(model.scale is not None for model in watched):
        refuse_leaks(roots)
    known = {mode.dtype for mode in dispatch_modes() if isinstance(mode, HalfEmulation)}
    with ExitStack() as stack:
        for model in models:
            if torch.is_autocast_enabled(model.device_type):
                model.refuse_autocast()
            wanted = {own.dtype for own in model.forward_context.emulations}
            if not known.issuperset(wanted):
                known |= wanted
                stack.enter_context(model.forward_context)
        if watched and len({model.policy for model in models}) == 1:
            stack.enter_context(watched[0].audit.watching())
        yield
