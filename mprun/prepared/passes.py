"""Backward passes of a script: what those of prepared models need, and the loss scales after them.

torch has one entry for all passes, and they go through `run_pass` here. A pass is a model's own if
it meets one of the model's nodes or parameters (nodes.py); others run as if there were no model.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mprun.precision.audit import Audit, is_due
from mprun.precision.batch_statistics import BatchNormGuard
from mprun.precision.delayed_scaling import DelayedScaling
from mprun.precision.emulation import HalfEmulation, below_emulation
from mprun.precision.forward_context import ForwardContext
from mprun.precision.loss_scale import LossScale
from mprun.precision.update import largest
from mprun.prepared.mixed_operands import refused
from mprun.prepared.nodes import (
    Root,
    entered,
    mark,
    reached,
    refuse_leaks,
    refuse_recomputed,
)
from mprun.prepared.scaling import Scaling, check_finite, scalings
from mprun.prepared.shards import agree, are_several, refuse_unshared
from mprun.prepared.tensors import Tensors
from mprun.torch_private import (
    DisableTorchFunction,
    OpOverload,
    autograd_node,
    dispatch_modes,
    graph_task,
    lacks_a_kernel,
    queue_callback,
    run_engine,
    tree_leaves,
    version_of,
)

_IN_16_BITS = ("Half", "BFloat16", "BComplex32")  # as torch's errors name them

# All prepared models; those whose next pass is audited.
alive: weakref.WeakSet[Any] = weakref.WeakSet()
due: weakref.WeakSet[Any] = weakref.WeakSet()
# What takes the hooks out of torch again, once no prepared model is left.
undo: list[Callable[[], None]] = []


def leave_torch() -> None:
    """Take the hooks out of torch if no prepared model is alive."""
    if not any(True for _ in alive):  # its length may count one that goes now
        while undo:
            undo.pop()()


class Passes:
    """The passes of this process.

    Attributes:
        number: how many have begun.
        fed: number of the newest in which a gradient has left a model at its inputs.
        last_step: number of the newest before the last step of an optimizer.
        before: number of the newest of the iteration before.
    """

    number = fed = last_step = before = 0
    task = -1  # the pass that runs now, as torch counts
    entered: list[Backward] = []  # by the gradients of that pass that they scale
    # Flags of the steps that hooks have taken within it: model -> those of its optimizers.
    stepped: dict[Backward, list[Tensor]] = {}


class Backward(ABC):
    """What backward passes know of a prepared model.

    Args:
        forward_context: the context in which its calls run.
        loss_scale: loss scale of its gradients.
    """

    tensors: Tensors
    of_run = False  # a run of `mprun` calls it, which knows when its steps end
    calls = 0  # with gradients or in training mode
    group: Any = None  # of the DistributedDataParallel that has called it
    delayed: DelayedScaling | None = None
    guard: BatchNormGuard | None = None
    _guards_step = False
    _rolled_at = 0  # calls at its last roll

    def __init__(self, forward_context: ForwardContext, loss_scale: LossScale):
        self.compute_in(forward_context)
        self.device_type = forward_context.device.type
        self.loss_scale = loss_scale
        # None if it neither scales nor skips.
        self.scale = loss_scale if loss_scale.skips_nonfinite else None
        # float32, 0-dim: the gradients of the newest backward pass are not finite.
        self.found_inf = torch.zeros((), device=forward_context.device)
        # Id of a parameter -> the gradient at which the newest pass has looked, and its version.
        self.looked_at: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self.fed = 0  # number of the newest pass in which a gradient has left it at its inputs
        self.has_gradients = False  # a pass has reached it since its last step
        # Largest magnitude of a gradient since its last step, for a loss scale that asks for it.
        self.grad_max: Tensor | None = None
        # Models that passes have entered together with it since then.
        self.partners: weakref.WeakSet[Any] = weakref.WeakSet()
        # Steps of the optimizers that hold its parameters, in the order in which they came, the
        # same in all processes -> number of the pass whose gradients they have used last.
        self.updated_by = weakref.WeakKeyDictionary[Any, int]()
        self.looked = 0  # number of the newest pass whose gradients were looked at
        # Of several optimizers, as `found_inf`: the gradients of each are not finite.
        self._found_of = weakref.WeakKeyDictionary[Any, Tensor]()

    def compute_in(self, forward_context: ForwardContext) -> None:
        """Take the mode of a context."""
        self.forward_context, self.policy = forward_context, forward_context.policy
        # None if that of `.grad`: FP32, or without masters what the optimizer has chosen.
        has_own = self.policy.masters == "kept" and self.policy.grad_dtype is not torch.float32
        self.grad_dtype = self.policy.grad_dtype if has_own else None
        self.audit = Audit(forward_context)

    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """Return its parameters as optimizers hold them, with their gradients after a pass."""

    @property
    @abstractmethod
    def looks_again(self) -> bool:
        """Return whether gradients are looked at again before a step if they have changed."""

    def updated(self, own: list[Tensor]) -> list[Tensor]:
        """Return those of its parameters `own` that optimizers hold, or all if none does.

        Nobody clears the gradients of others: one that has overflowed stays so.
        """
        held = {id(one) for steps in [*self.updated_by] for one in steps.held}
        return [one for one in own if id(one) in held] or own

    def end_step(self, found_inf: Tensor | None) -> None:
        """End an update; if it was skipped, restore the statistics from before its calls."""
        if self.guard is not None and self._guards_step:
            self.guard.restore_where(found_inf)
        self._guards_step = self.has_gradients = False
        self.partners.clear()

    def roll(self) -> None:
        """End an update of delayed scaling, once for all optimizers of an iteration."""
        if self.delayed is not None and self._rolled_at != self.calls:
            self._rolled_at = self.calls
            self.delayed.roll(self.largest_of_all)

    def largest_of_all(self, values: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        agree(values, self.parameters())
        return values

    def on_pass(self, what: str) -> None:
        """Hear that a gradient of the pass that runs now goes through one of its nodes."""
        if self.scale is None:
            return
        if what == "in":
            self.fed = Passes.fed = Passes.number
        else:  # a penalty on gradients reaches weights through no output
            self._enter()

    def look(self) -> None:
        """Look at the gradients at the end of a pass, before the script can change them; nothing
        waits.

        Parameters that other optimizers update may have infinite gradients from another loss.
        """
        own = self.parameters()  # once: the walk over a network takes 100 microseconds
        self.looked = Passes.number
        check_finite(self.updated(own), self.found_inf.zero_())
        self.looked_at = {
            id(one): (weakref.ref(one.grad), version_of(one.grad))
            for one in own
            if one.grad is not None
        }
        if are_several():  # shards have none before those of several passes are added up
            self.has_gradients = any(one.grad is not None for one in own)
        if len(self.updated_by) < 2:
            self._found_of.clear()
            return
        inside = {id(one) for one in own}
        for steps in [*self.updated_by]:
            found = self._found_of.setdefault(steps, torch.zeros_like(self.found_inf))
            check_finite([one for one in steps.held if id(one) in inside], found.zero_())

    def flag_for(self, steps: Any) -> Tensor | None:
        """Return whether the gradients of `steps` are not finite, as of the newest pass.

        None: it is of an earlier iteration, or an earlier step has asked. The model has had no part
        in a loss since then, and its gradients may have been cleared.
        """
        asked = self.updated_by.get(steps)
        if asked is not None:
            self.updated_by[steps] = self.looked
        if self.looks_again and (asked == self.looked or self.looked <= Passes.before):
            return None
        return self._found_of.get(steps, self.found_inf)

    def is_new(self, own: Tensor) -> bool:
        """Return whether a script has set or changed the gradient of a parameter since a pass."""
        if (gradient := own.grad) is None:
            return False
        seen, version = self.looked_at.get(id(own), (None, 0))
        return seen is None or seen() is not gradient or version_of(gradient) != version

    def on_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the largest magnitude of those that passes have added since the last step.

        Of each pass by itself: `.grad` has sums of several.
        """
        if self.loss_scale.needs_grad_max:
            with torch.no_grad(), DisableTorchFunction():  # an emulation looks at each access
                found, before = largest(gradients, self.found_inf.device), self.grad_max
                self.grad_max = found if before is None else torch.maximum(before, found)

    def _enter(self) -> None:
        task = graph_task()
        if task != Passes.task:
            Passes.task, Passes.entered = task, []
            if not self.of_run:
                _expect_end()
        if self in Passes.entered:
            return
        for other in Passes.entered:
            self.partners.add(other)
            other.partners.add(self)
        Passes.entered.append(self)
        if not self.has_gradients:
            self.grad_max = None
        elif not self.of_run and all(own.grad is None for own in self.updated(self.parameters())):
            # Gradients were cleared without a step. A script that only steps if they are finite
            # would never let the scale move.
            Scaling.of(self.loss_scale).end_without_step(self.found_inf, [self])
            self.grad_max = None
        self.has_gradients = True

    def expect_pass(self, outputs: Any) -> None:
        """Let the model's next pass be audited, if there is to be one."""
        tensors = (t for t in tree_leaves(outputs) if isinstance(t, Tensor))
        reaching = [t for t in tensors if t.grad_fn is not None]
        mark(reaching, "out", self)
        if reaching:
            due.add(self)

    def refuse_alone(self) -> None:
        """Raise RuntimeError if several processes train it, but nothing adds up their gradients."""
        if self.of_run or not are_several() or not self.calls or self.group is not None:
            return
        refuse_unshared([own for own in self.parameters() if own.requires_grad])

    def refuse_autocast(self) -> None:
        """Raise RuntimeError: torch.autocast is active."""
        raise RuntimeError(
            "torch.autocast is active around the forward or backward pass of a model prepared as "
            f"precision={self.policy.name}. Remove torch.autocast: the precision mode decides on "
            "the dtype of each operation"
        )


def note_step(model: Backward, found_inf: Tensor) -> None:
    """Note that a hook has taken a step of `model` within the pass that runs now.

    It ends with the pass, whose other nodes still need the scale, and delayed ones, as they are.
    """
    if Passes.task == -1:  # nothing in it is scaled
        Passes.task = graph_task()
        _expect_end()
    Passes.stepped.setdefault(model, []).append(found_inf)


def _expect_end() -> None:
    # Twice, to come after the callback in which DistributedDataParallel ends its reduction.
    queue_callback(lambda: queue_callback(_end_pass))


@torch.no_grad()
def _end_pass() -> None:
    """End a pass of models that scale."""
    gradients = (own.grad for model in Passes.entered for own in model.parameters())
    with DisableTorchFunction(), below_emulation(gradients):
        for model in Passes.entered:
            model.look()
    if Passes.stepped:
        _end_steps(Passes.stepped)
    Passes.task, Passes.entered, Passes.stepped = -1, [], {}


def _end_steps(stepped: Mapping[Backward, Sequence[Tensor]]) -> None:
    """End the steps that hooks have taken within a pass, once it has no use for scales any more."""
    together = {one for model in stepped for one in (model, *model.partners)}
    found = torch.stack([flag for flags in stepped.values() for flag in flags]).amax()
    for model in together:
        model.found_inf.logical_or_(found)  # their gradients may be gone
        model.end_step(model.found_inf if model.scale is not None else None)
    roll(stepped)
    for scaling in scalings(stepped):
        scaling.end_pass()


def roll(models: Collection[Backward]) -> None:
    """End an update of delayed scaling of `models`, in the same order in all processes.

    It is one of those, too, that no optimizer holds, such as a network in a loss. What is left of a
    run that was stopped is none of them: its casts would count in the next run.
    """
    delayed = [own for own in alive if own.delayed is not None and not own.of_run]
    held_by_none = [own for own in delayed if not own.updated_by]
    for model in (*models, *sorted(held_by_none, key=lambda one: one.number)):
        model.roll()


def run_pass(roots: Sequence[Root], *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass, in the arithmetic of the models whose pass it is."""
    if Passes.last_step == Passes.number:
        Passes.before = Passes.number
    Passes.number += 1
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    every = [*alive]  # once: weak sets take microseconds
    if inputs := args[3] if len(args) > 3 else kwargs.get("inputs"):
        asked = frozenset(id(own) for own in inputs if isinstance(own, nn.Parameter))
        for model in every if asked else ():
            model.tensors.ask(asked)
    # Products of models in other modes would count for the one that is watched.
    those = every if due or autocast else [one for one in every if one.forward_context.emulations]
    scaled = [model for model in every if model.scale is not None]
    scales = {model.loss_scale for model in scaled}
    if graph_task() != -1 and (new := [own for own in scaled if is_due(own.calls - 1)]):
        refuse_recomputed(autograd_node(), roots, new, lambda own: own.tensors.dtypes())
    try:
        with (
            _in_arithmetic(roots, those) if those else nullcontext(),
            _scaled_alike(roots) if len(scales) > 1 else nullcontext(),
        ):
            return run_engine(roots, *args, **kwargs)
    except RuntimeError as error:
        in_16_bits = any(name in str(error) for name in _IN_16_BITS)
        if not (lacks_a_kernel(error) and in_16_bits) or "override" in str(error):
            raise
        raise NotImplementedError(refused(_failed_in(error), error)) from error
    finally:
        if graph_task() == -1:  # a checkpoint's pass within a pass goes on with the same weights
            Passes.task, Passes.entered, Passes.stepped = -1, [], {}  # of one that failed, too
            for model in every:  # met or not: `.data` counts no versions
                # A run forgets them before its step. Shards are gathered anew in the same memory.
                if not model.of_run or model.tensors.shards:
                    model.tensors.forget()


def within_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as a backward pass has to compute it again for a checkpoint: within the
    calls of models that are under way now.

    What it calls of a model would enter the mode by itself, but not what it reads of its tensors.
    """
    calls = [(model, model.called) for model in [*alive] if model.called is not None]

    def again(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for model, module in calls if graph_task() != -1 else ():
                if model.called is None:
                    stack.enter_context(model.in_mode(module, audits=False))
            return function(*args, **kwargs)

    return again if calls else function


def _failed_in(error: BaseException) -> str:
    """Return which operator of a pass has failed, if a mode was there that sees each."""
    seen = [frame.f_locals.get("func") for frame, _ in walk_tb(error.__traceback__)]
    names = [own.name() for own in seen if isinstance(own, OpOverload)]
    return f"the backward pass: {names[-1] if names else 'an operation'}"


@contextmanager
def _in_arithmetic(roots: Sequence[Root], those: Sequence[Backward]) -> Iterator[None]:
    """Emulate and watch, as those models need it whose pass begins at `roots`.

    A CPU needs the emulation as in a forward pass. The engine gives each node the thread state from
    the start of the pass, so no node can switch it on.
    """
    known = {mode.dtype for mode in dispatch_modes() if isinstance(mode, HalfEmulation)}
    wanted = {mode.dtype for model in those for mode in model.forward_context.emulations}
    looks_at_all = due or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))

    def leaves() -> dict[int, Any]:
        return {key: model for model in those for key in model.tensors.dtypes()}

    def are_enough(found: Sequence[Any]) -> bool:
        """Return whether these need all emulations, and nothing else is to be known of others."""
        own = {mode.dtype for model in found for mode in model.forward_context.emulations}
        return not looks_at_all and wanted <= known | own

    models: list[Any] = reached(roots, those, leaves, are_enough)
    watched = [model for model in models if model in due]
    # One that was called again has had its chance: nothing may ever differentiate its outputs.
    due.difference_update([*watched, *(model for model in due if not is_due(model.calls - 1))])
    if any(model.scale is not None for model in watched):
        refuse_leaks(roots)
    with ExitStack() as stack:
        for model in models:
            if torch.is_autocast_enabled(model.device_type):
                model.refuse_autocast()
            own = {mode.dtype for mode in model.forward_context.emulations}
            if not known.issuperset(own):
                known |= own
                stack.enter_context(model.forward_context)
        if watched and len({model.policy for model in models}) == 1:
            stack.enter_context(watched[0].audit.watching())
        yield


@contextmanager
def _scaled_alike(roots: Sequence[Root]) -> Iterator[None]:
    """Scale in models that a pass from `roots` only goes through as in the one that it trains.

    The loss of a generator goes through a frozen discriminator. What overflows there is a gradient
    of that loss, and the generator's step is skipped, so the generator's scale has to fall.
    """
    scaled: dict[Any, bool] = {
        model: is_trained for model, is_trained in entered(roots).items() if model.scale is not None
    }
    scales = {model.loss_scale for model, is_trained in scaled.items() if is_trained}
    through = [model for model, is_trained in scaled.items() if not is_trained]
    own = [model.scale for model in through]
    if len(scales) == 1:
        (scale,) = scales
        for model in through:
            model.scale = scale
    try:
        yield
    finally:
        for model, before in zip(through, own, strict=True):
            model.scale = before
