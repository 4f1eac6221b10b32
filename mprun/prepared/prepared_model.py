"""A user's model in a precision mode, which from outside still looks like the same FP32 model.

Between two calls a prepared model is the plain one: its parameters are FP32 leaves, and its type,
hooks and state dictionary are unchanged. Within a call parameters and inputs are rounded on the way
in, and outputs are widened on the way out. Evaluation (eval mode without gradients) computes in
FP32, so that it measures the learned weights.

A mode without master weights (fp16_naive) has none to show: its parameters are 16-bit tensors.

Each module instance gets a new `forward`. After pickling it is a plain module again;
`copy.deepcopy` of the whole model prepares the copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, is_autocast_enabled, is_grad_enabled, nn

from mprun.precision.audit import is_due
from mprun.precision.batch_statistics import BatchNormGuard
from mprun.precision.casting import in_fp32
from mprun.precision.emulation import Losses
from mprun.precision.forward_context import ForwardContext
from mprun.precision.loss_scale import LossScale
from mprun.precision.module_dtypes import called_in
from mprun.precision.policy import ieee_fp32
from mprun.precision.recurrent import own_recurrent
from mprun.precision.torch_update import is_granted
from mprun.prepared import passes
from mprun.prepared.border import OWN, Border, Forward, Watched, has_hooks
from mprun.prepared.compiled import Compiled, taken_by
from mprun.prepared.containers import each_tensor
from mprun.prepared.copies import own_copy, plain_state, prepared_copy
from mprun.prepared.draws import Draws
from mprun.prepared.exact_numbers import ExactNumbers
from mprun.prepared.mixed_operands import MixedOperands
from mprun.prepared.modules import entries, put_in_mode, refuse_changed, refuse_moved
from mprun.prepared.passes import Backward
from mprun.prepared.shards import (
    gathered_together,
    keeps_half,
    parameters_between_calls,
    refuse_replica,
    why_not_sharded,
)
from mprun.prepared.tensors import Tensors
from mprun.torch_private import (
    REPLICATE,
    active_ddp_module,
    children_of,
    graph_task,
    set_compiler,
    uncompiled,
)


class PreparedModel(Backward):
    """A model in a mode.

    Args:
        model: in FP32; its tensors stay the same objects.
        forward_context: the context in which its calls run.
        loss_scale: loss scale of its gradients.
        overrides: glob pattern over module names -> dtype in which these compute.
        of_run: a run of `mprun` calls it, which watches its own steps and numbers their
            micro-batches.
        key: what names the overrides in messages.
        seed: seed of the random bits of its optimizers' rounding; None: that of the script.
    """

    built = 0  # number of builds, including rebuilds
    evaluates_in_mode, _widens, _has_drawn = False, True, False

    def __init__(
        self,
        model: nn.Module,
        forward_context: ForwardContext,
        loss_scale: LossScale,
        overrides: Mapping[str, torch.dtype],
        *,
        of_run: bool = False,
        key: str = "overrides",
        seed: int | None = None,
    ):
        super().__init__(forward_context, loss_scale)
        self.model, self.overrides = model, dict(overrides)
        self.roots = {model, *called_in("", model).values()}  # that scripts call, and copy
        self.of_run, self.key, self.seed = of_run, key, seed
        self.tensors, self.exact = Tensors(self, model), ExactNumbers(model)
        self.number = PreparedModel.built  # in the order in which models were prepared
        self._audits = False
        self._parameters: list[Tensor] = []
        self._shards: list[Tensor] = []  # of a sharded model, as its optimizers hold them
        self.state = Forward.OUTSIDE
        self.called: nn.Module | None = None  # its call computes in the mode
        self._compiler: Any = None  # what compiles the frames of the caller
        self._compiled = Compiled()
        self._first = next(model.parameters())
        if of_run:  # also in FP32: a run can repeat its dropout masks, and no step waits for them
            own_recurrent(model)
        self._take_mode()
        self._build()
        self.dtype = self._first.dtype  # as seen from outside
        passes.alive.add(self)
        weakref.finalize(self, passes.leave_torch).atexit = False

    def switch(self, forward_context: ForwardContext) -> None:
        """Compute in another mode from the next call on; both keep FP32 masters.

        Weights, statistics and loss scale stay as they are, and so do the numbers by which random
        bits are drawn. Calls and products count anew, and are watched as at the start.
        """
        if self.state != Forward.OUTSIDE or graph_task() != -1:
            raise RuntimeError("a model changes its mode between two steps, not within a call")
        before, guard = self.audit.result(), self.guard
        self.compute_in(forward_context)
        self.audit.before = before
        for part in self.model.modules():
            for name in OWN[1:]:
                part.__dict__.pop(name, None)
        passes.due.discard(self)
        self.tensors.forget()
        self._take_mode()
        self._build()
        self.guard = guard or self.guard  # it holds the statistics themselves
        for steps in [*self.updated_by]:
            steps.begin_mode()

    def _take_mode(self) -> None:
        """Set what calls need in the mode of `forward_context`."""
        policy, context = self.policy, self.forward_context
        in_16_bits = bool(context.half_dtypes)  # of the mode, or of an override
        changes = in_16_bits or policy.matmul is not None or self.grad_dtype is not None
        self.is_plain = not changes and self.scale is None  # it computes as without the mode
        self._is_untouched = self.is_plain and policy.fp32_math == "ieee"
        # True if activations are in 16 bits without autocast.
        casts = policy.autocast_dtype is None and in_16_bits
        self.tensors.set_mode(rounds=casts and policy.master_dtype is not None)
        meets = self.scale is not None or in_16_bits
        # What serves code in forward that was written for FP32; None: it meets nothing else.
        self.mixed = MixedOperands(self, self.model) if meets else None
        narrow = policy.param_dtype if policy.param_dtype.itemsize == 2 else None
        self.border = Border(self, self.model, narrow)
        self.stores_half = keeps_half(policy)
        self.audit.written, self.audit.left = self.tensors.written, self.border.left
        if self.mixed is not None:
            self.audit.rounded = self.mixed.places
        self.audit.destroyed = self.exact.places
        # An emulation sees every function anyway.
        self._losses = Losses(policy.loss_dtype) if casts and not context.emulations else None
        for emulation in context.emulations if casts else ():
            emulation.functions.loss_dtype = policy.loss_dtype
        self._draws = policy.draws and not self.of_run  # calls have numbers, which are given here
        if self._draws and not self._has_drawn:
            self._has_drawn = True
            Draws.begin(context.device, self)
        self.calls = self._rolled_at = 0

    def _build(self) -> None:
        """Put the modules into the mode and intercept their calls; again after some were added."""
        before, changes = self.delayed, not self.is_plain
        made = put_in_mode(self.model, self.forward_context, self.overrides, self.key, changes)
        self.delayed, self.tensors.parts, self.stays = made.delayed, made.parts, made.stays
        if self.delayed is not None and before is not None and before.is_like(self.delayed):
            self.delayed.take_over(before.state_dict())
        self._find_shards()
        kind = Watched if self._is_untouched else Forward
        for module in entries(self.model, made.plain, self._is_untouched):
            inside = module.__dict__.pop("forward", None)
            forward = module.__dict__["forward"] = kind(self, module, made.plain[module], inside)
            module.__dict__["__getstate__"] = partial(plain_state, forward)
            module.__dict__[REPLICATE] = refuse_replica
            if hasattr(type(module), "__deepcopy__"):
                module.__dict__["__deepcopy__"] = partial(own_copy, forward)
        for root in self.roots:
            root.__dict__["__deepcopy__"] = partial(prepared_copy, self, root)
        if self.scale is not None:
            self.guard = BatchNormGuard(self.model)
        PreparedModel.built += 1

    # Shards

    def _find_shards(self) -> None:
        """Look for the modules to which `fully_shard` was applied."""
        self.tensors.shards = gathered_together(
            self.model, {part[0]: part for part in self.tensors.parts}
        )
        if self.is_sharded and (reason := why_not_sharded(self.policy)):
            raise RuntimeError(reason)

    @property
    def is_sharded(self) -> bool:
        """Return whether `fully_shard` was applied to it, or to modules in it."""
        return bool(self.tensors.shards)

    @property
    def looks_again(self) -> bool:
        """Return whether gradients are looked at again before a step if they have changed: not of
        shards, for which all processes look together."""
        return self.scale is not None and not (self.of_run or self.is_sharded)

    def parameters(self) -> list[Tensor]:
        if not self.is_sharded:
            # Those of a run stay the same; the walk over a network takes 100 microseconds.
            self._parameters = self._parameters if self.of_run else []
            self._parameters = self._parameters or [*self.model.parameters()]
            return self._parameters
        self._shards = self._shards or parameters_between_calls(self.model)
        return self._shards

    # Calls

    @uncompiled
    def call(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, or a part of it, from outside."""
        before, self._compiler = self._compiler, set_compiler(None)
        try:
            return self._call(forward, args, kwargs)
        finally:
            set_compiler(self._compiler)
            self._compiler = before

    def _call(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A checkpoint's recomputation inside the model counts as inside.
        again = graph_task() != -1 and not forward.calls
        if forward.makes_weights and not (again or self.stores_half):
            return self._evaluate(forward, args, kwargs)
        if not again and is_autocast_enabled(self.device_type):
            self.refuse_autocast()
        if not (forward.module.training or is_grad_enabled()):
            compute = self._compute if self.evaluates_in_mode else self._evaluate
            return compute(forward, args, kwargs)
        if again:
            with self.in_mode(forward.module, audits=False):
                return self._computed(forward, args, kwargs)
        # A run looks at its first step, and compiles then.
        is_new = is_due(self.calls) or is_due(forward.calls)
        audits = is_new and not (self.of_run and self._compiler is not None)
        self._check(forward.module, audits)
        self.calls, forward.calls = self.calls + 1, forward.calls + 1
        if dist.is_initialized() and (ddp := active_ddp_module()) is not None:
            if self.group is None:
                self._join(ddp.process_group)
            self.group = ddp.process_group
        if self._draws:
            Draws.begin_call(self.forward_context.device)
        if not self._guards_step and is_grad_enabled():
            self.guard_step()
        outputs = self._compute(forward, args, kwargs, audits)
        if audits and not self.of_run:
            self.expect_pass(outputs)
        return outputs

    def _join(self, group: Any) -> None:
        """Hear that DistributedDataParallel sums the gradients of this and other processes."""
        if self._draws:
            Draws.share_seed(self.forward_context.device, group)
        for steps in [*self.updated_by]:
            steps.add_up_in_16_bits()

    def _compute(
        self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], audits: bool = False
    ) -> Any:
        """Compute in the mode, with tensors from outside and for it."""
        self._compiled.in_layers = self.is_sharded
        served, emulated = self._is_served(), bool(self.forward_context.emulations)
        self._compiled.is_seen = audits or served or emulated
        if self._compiler is not None and not audits and served:
            self._compiled.tell(self.policy.name, self.audit.written | self.audit.rounded)
        if self.is_plain:
            watching = self.audit.watching() if audits and not self.of_run else nullcontext()
            with self._in_state(Forward.IN_MODE), watching:
                return self._computed(forward, args, kwargs)
        if audits and self._sees_values():
            if self.border.dtype is not None:
                self.exact.look_at_inputs(forward.module, args, kwargs, self.border.dtype)
            if self.tensors.rounds:
                self.exact.look_at_buffers(self.tensors.parts)
        args, kwargs = each_tensor((args, kwargs), self.border.inwards)
        with self.in_mode(forward.module, audits):
            outputs = self._computed(forward, args, kwargs)
        self.border.let_out(audits)
        return each_tensor(outputs, self.border.outwards) if self._widens else outputs

    def _computed(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._compiler is None:
            return forward.compute_within(args, kwargs)
        return self._compiled.compute(self._compiler, forward, args, kwargs)

    @uncompiled
    def compute_part(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a module inside that is compiled by itself, within a call of the model."""
        compiler = set_compiler(None)
        try:
            evaluates = self.state == Forward.EVALUATING
            compute = self._compiled.evaluate if evaluates else self._compiled.compute
            return compute(compiler, forward, args, kwargs)
        finally:
            set_compiler(compiler)

    def _is_served(self) -> bool:
        """Return whether calls have shown that code in forward needs help in the mode."""
        return self.tensors.writes or (self.mixed is not None and self.mixed.was_used)

    def guard_step(self) -> None:
        """Keep BatchNorm's statistics from before the calls of a step, unless nothing skips it."""
        if self.guard is None:
            return
        if not self.guard.is_current():
            self.guard = type(self.guard)(self.model)
        self.guard.save()
        self._guards_step = True

    @uncompiled
    def call_gathered(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module inside that has just gathered its weights, within a call of the model."""
        compiler = set_compiler(None)
        try:
            if self._audits:
                self._check_tensors(forward.module)
            serves = self._audits or self.tensors.writes
            inside = self.tensors.inside(forward.module, self._audits, serves)
            with inside, self._in_state(Forward.IN_MODE, forward.module):
                return taken_by(compiler, forward.compute_within, (args, kwargs), {})
        finally:
            set_compiler(compiler)

    @contextmanager
    def in_mode(self, module: nn.Module, audits: bool) -> Iterator[None]:
        """Let code compute as within a call of `module`."""
        self._audits = audits and self._sees_values()
        self._follow_modules()
        parts = self.tensors.parts if self.tensors.changes else []
        hooked = [part for part, _, _ in parts if has_hooks(part)]
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                # In inference mode tensors count no versions, and the emulation sees no parts of a
                # batch norm.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            serves = audits or self._is_served()
            # Before the emulation, which would check each access and find nothing to do.
            stack.enter_context(self.tensors.inside(module, self._audits, serves))
            if hooked:
                self._compiled.in_layers = True
                stack.enter_context(self.border.hooks_outside(hooked))
            stack.enter_context(self.border.attributes_inside(audits))
            stack.enter_context(self.forward_context)
            if self._losses is not None:
                stack.enter_context(self._losses)
            if self.policy.autocast_dtype is not None:
                stack.enter_context(self.forward_context.autocast())
            if audits and not self.of_run:
                stack.enter_context(self.audit.watching())
            if self.mixed is not None and (audits or self.mixed.was_used):
                stack.enter_context(self.mixed)
            stack.enter_context(self._in_state(Forward.IN_MODE, module))
            yield

    def _sees_values(self) -> bool:
        # It waits for the device: a run's first call may, and a device without values has none.
        return not self.of_run or (self.calls == 1 and not is_granted())

    @contextmanager
    def _in_state(self, state: int, called: nn.Module | None = None) -> Iterator[None]:
        before, self.state, self.called = (self.state, self.called), state, called
        try:
            yield
        finally:
            self.state, self.called = before

    @contextmanager
    def staying_inside(self, whole: PreparedModel | None = None) -> Iterator[None]:
        """Let calls return tensors as the mode made them, with scaled gradients.

        What is computed from them leaves by `outside`.

        whole: the model that made their inputs, also inside. Then this one is a frozen part of it:
            gradients keep the scale of the whole, and a skipped step of it undoes these calls.
        """
        before = self._widens, self.scale
        self._widens = False
        if whole is not None:
            self.scale = None
            whole.partners.add(self)
        try:
            yield
        finally:
            self._widens, self.scale = before

    def outside(self, tensor: Tensor) -> Tensor:
        """Take a tensor out of the model, as its outputs usually are."""
        return tensor if self.is_plain else self.border.outwards(tensor)

    @contextmanager
    def evaluating_in_mode(self, widens: bool = True) -> Iterator[None]:
        """Let evaluations compute in the mode, as a step does.

        widens: their outputs are widened to FP32, else they keep the dtype of the mode.
        """
        self.evaluates_in_mode, self._widens = True, widens
        try:
            yield
        finally:
            self.evaluates_in_mode, self._widens = False, True

    def _evaluate(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute in FP32: with the master weights, or with widened 16-bit weights."""
        with ExitStack() as stack:
            stack.enter_context(self._in_state(Forward.EVALUATING))
            if self.stores_half:
                args, kwargs = each_tensor((args, kwargs), self._widened)
                stack.enter_context(in_fp32(self.model))
            if self.policy.fp32_math != "ieee":
                stack.enter_context(ieee_fp32())
            return self._compiled.evaluate(self._compiler, forward, args, kwargs)

    def _widened(self, tensor: Tensor) -> Tensor:
        # A state created like the parameters, such as an LSTM's, has their 16-bit dtype.
        return tensor.float() if tensor.dtype is self.policy.param_dtype else tensor

    # Refusals

    def _check(self, module: nn.Module, audits: bool) -> None:
        """Raise RuntimeError if the model is no longer the one that was prepared."""
        first = self._first
        if first.dtype is not self.dtype or first.device.type != self.device_type:
            refuse_moved(first, self.device_type, self.dtype)
        if not audits:
            return
        if not self.is_sharded:
            self._find_shards()
        self._follow_modules()
        self._check_tensors(module)

    def _check_tensors(self, module: nn.Module) -> None:
        for part, _, _ in self.tensors.shards.get(module, self.tensors.parts):
            refuse_changed(part, self)

    def _follow_modules(self) -> None:
        """Take in what the script has put into the model since."""
        if any(tuple(children_of(m).values()) != children for m, _, children in self.tensors.parts):
            self._build()
