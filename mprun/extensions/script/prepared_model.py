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

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed import (
    ReduceOp,
    all_reduce,
    broadcast,
    get_rank,
    get_world_size,
    is_initialized,
)

from mprun.extensions.script import passes
from mprun.extensions.script.nodes import make_nodes, mark
from mprun.extensions.script.shards import (
    FSDP1,
    agree,
    gathered_together,
    is_of_shards,
    is_sharded,
    keeps_half,
    parameters_between_calls,
    refuse_spread,
    why_not_sharded,
)
from mprun.extensions.script.tensors import Tensors
from mprun.precision.audit import Audit, is_due
from mprun.precision.casting import (
    CastModel,
    cast_around_modules,
    cast_tree,
    chosen_dtypes,
    dtype_of,
)
from mprun.precision.delayed_scaling import DelayedScaling
from mprun.precision.emulation import ForwardContext, Losses
from mprun.precision.loss_scale import LossScale
from mprun.precision.optimizer import BatchNormGuard
from mprun.precision.philox import micro_batches
from mprun.precision.policy import ieee_fp32
from mprun.precision.recurrent import own_recurrent
from mprun.precision.scaled_linear import KEPT, install
from mprun.torch_private import (
    CALL_WITH_HOOKS,
    FLAT_WEIGHT_REFS,
    FLAT_WEIGHTS,
    HOOKS,
    PLACES,
    REPLICATE,
    Loss,
    active_ddp_module,
    apply_to_tensors,
    children_of,
    disable_dynamo,
    graph_task,
    tree_leaves,
    tree_map,
)

_OUTSIDE, _IN_MODE, _EVALUATING = range(3)
_OWN = ("forward", "__getstate__", "__deepcopy__", REPLICATE, KEPT)
# Attributes of modules that are no places of the user's.
_NO_PLACES = frozenset([*nn.Module().__dict__, *_OWN, FLAT_WEIGHTS, FLAT_WEIGHT_REFS])


class PreparedModel:
    """A model in a mode.

    Args:
        model: in FP32; its tensors stay the same objects.
        forward_context: the context in which its calls run.
        loss_scale: loss scale of its gradients.
        overrides: glob pattern over module names -> dtype in which these compute.
    """

    built = 0  # number of builds, including rebuilds
    drawn = 0  # calls of all models that round at random, on all ranks

    def __init__(
        self,
        model: nn.Module,
        forward_context: ForwardContext,
        loss_scale: LossScale,
        overrides: Mapping[str, torch.dtype],
    ):
        self.model, self.forward_context, self.loss_scale = model, forward_context, loss_scale
        self.device_type = forward_context.device.type
        self.overrides = dict(overrides)
        self.policy = policy = forward_context.policy
        # None if it neither scales nor skips.
        self.scale = loss_scale if loss_scale.skips_nonfinite else None
        changes = policy.half_dtype is not None or policy.products is not None
        self.is_plain = not changes and self.scale is None  # it computes as without the mode
        self._is_untouched = self.is_plain and policy.fp32_math == "ieee"
        # True if activations are in 16 bits without autocast.
        self._casts = policy.autocast_dtype is None and policy.half_dtype is not None
        self.tensors = Tensors(self, rounds=self._casts and policy.master_dtype is not None)
        self.stores_half = keeps_half(policy)
        # float32, 0-dim: the gradients of the newest backward pass are not finite.
        self.found_inf = torch.zeros((), device=forward_context.device)
        self.audit = Audit(forward_context)
        self.audit.written = self.tensors.written
        self.calls = 0  # with gradients or in training mode
        self.fed = 0  # number of the newest pass in which a gradient has left it at its inputs
        self.group: Any = None  # of the DistributedDataParallel that has called it
        self.has_gradients = False  # a pass has reached it since its last step
        self.seen: Sequence[Tensor] = ()  # its parameters at the end of the newest pass
        self._guards_step = self._audits = False
        # Models that passes have entered together with it since then.
        self.partners: weakref.WeakSet[PreparedModel] = weakref.WeakSet()
        # Steps of the optimizers that hold its parameters, in the order in which they came, the
        # same in all processes.
        self.updated_by: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._shards: list[Tensor] = []  # of a sharded model, as its optimizers hold them
        self.state = _OUTSIDE
        # By id and key of a place: its name, the place, its key; the tensor left there as seen from
        # outside and from inside; and whether the place holds a tensor from outside.
        self._known: dict[tuple[int, Any], tuple[str, Any, Any]] = {}
        self._left: dict[tuple[int, Any], tuple[Any, Any]] = {}
        self._come: set[tuple[int, Any]] = set()
        self._losses: AbstractContextManager[Any] = nullcontext()
        if self._casts and forward_context.emulations:
            for emulation in forward_context.emulations:  # which sees every function anyway
                emulation.functions.loss_dtype = policy.loss_dtype
        elif self._casts:
            self._losses = Losses(policy.loss_dtype)
        if policy.draws:
            self._begin_drawing()
        self.delayed: DelayedScaling | None = None
        self._rolled_at = 0  # calls at its last roll
        self._first = next(model.parameters())
        self._build()
        self._dtype = self._first.dtype  # as seen from outside
        passes.alive.add(self)
        if forward_context.emulations:
            passes.emulating.add(self)

    def _build(self) -> None:
        """Set the dtype in which each module computes and its `forward`; again after modules were
        added."""
        # Metrics only count results of other modules.
        metrics = {m for one in self.model.modules() if _is_metric(one) for m in one.modules()}
        named = {name: m for name, m in self.model.named_modules() if m not in metrics}
        plain: dict[nn.Module, Any] = {}
        for module in named.values():
            known = module.__dict__.pop("forward", None)
            plain[module] = known.plain if isinstance(known, Forward) else known
            if plain[module] is not None:
                module.__dict__["forward"] = plain[module]
        chosen = chosen_dtypes(self.model, self.overrides, "overrides")
        dtypes = {
            m: torch.float32 if isinstance(m, Loss) else dtype_of(name, m, self.policy, chosen)
            for name, m in named.items()
        }
        if self.stores_half:
            for module, dtype in dtypes.items():
                apply_to_tensors(module, functools.partial(cast_tree, dtype=dtype), recurse=False)
        if not self.is_plain:
            own_recurrent(self.model)
            if self.policy.products is not None:
                before = self.delayed
                self.delayed = install(self.model, self.policy.products, chosen)
                if self.delayed is not None and before is not None:
                    self.delayed.take_over(before.state_dict())
            cast_around_modules(self.model, self.policy, chosen)
            for module in metrics:
                module.__dict__.pop("forward", None)
        self.tensors.parts = [
            (m, dtype, tuple(children_of(m).values())) for m, dtype in dtypes.items()
        ]
        self._find_shards()
        kind = Watched if self._is_untouched else Forward
        for module in self._entries(named.values()):
            inside = module.__dict__.pop("forward", None)
            forward = module.__dict__["forward"] = kind(self, module, plain[module], inside)
            module.__dict__["__getstate__"] = forward.plain_state
            module.__dict__[REPLICATE] = _refuse_replica
        self.model.__dict__["__deepcopy__"] = self._deepcopied
        self.guard = BatchNormGuard(self.model) if self.scale is not None else None
        PreparedModel.built += 1

    def _entries(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Return the modules whose calls are intercepted: all, or the outermost callable ones."""
        if not self._is_untouched:
            # A loss that is a part of the model is none of it: between calls it is FP32.
            return [m for m in modules if not isinstance(m, Loss)]
        found, todo = [self.model], [self.model]
        while todo:
            module = todo.pop()
            if module is not self.model and not _is_metric(module):
                found.append(module)
            # A trainer calls another method; a module list has no forward.
            if type(module).forward is nn.Module.forward or hasattr(module, "training_step"):
                todo += module.children()
        return found

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

    def parameters(self) -> list[Tensor]:
        """Return its parameters as optimizers hold them, with their gradients after a pass."""
        if not self.is_sharded:
            return [*self.model.parameters()]
        self._shards = self._shards or parameters_between_calls(self.model)
        return self._shards

    # Calls

    @disable_dynamo(recursive=False)
    def call(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, or a part of it, from outside."""
        # A checkpoint's recomputation inside the model counts as inside.
        again = graph_task() != -1 and not forward.was_called
        if not again and is_autocast_enabled(self.device_type):
            self.refuse_autocast()
        if not (forward.module.training or is_grad_enabled()):
            return self._evaluate(forward, args, kwargs)
        if again:
            with self._in_mode(forward.module, audits=False):
                return forward.compute_within(args, kwargs)
        audits = is_due(self.calls)
        self._check(forward.module, audits)
        forward.was_called = True
        self.calls += 1
        if is_initialized():
            if (ddp := active_ddp_module()) is not None:
                if self.group is None and self.policy.draws:
                    self._share_seed(ddp.process_group)
                self.group = ddp.process_group
        if self.policy.draws:
            self._draw()
        if self.guard is not None and not self._guards_step and is_grad_enabled():
            if not self.guard.is_current():
                self.guard = BatchNormGuard(self.model)
            self.guard.save()
            self._guards_step = True
        if self.is_plain:
            with self._in_state(_IN_MODE), self.audit.watching() if audits else nullcontext():
                outputs = forward.compute_within(args, kwargs)
            if audits:
                self._expect_pass(outputs)
            return outputs
        args, kwargs = each_tensor((args, kwargs), self._inwards)
        with self._in_mode(forward.module, audits):
            outputs = forward.compute_within(args, kwargs)
        self._let_out(audits)
        outputs = each_tensor(outputs, self._outwards)
        if audits:
            self._expect_pass(outputs)
        return outputs

    @disable_dynamo
    def _expect_pass(self, outputs: Any) -> None:
        """Let the model's next pass be audited, if there is to be one."""
        reaching = [t for t in tree_leaves(outputs) if _has_graph(t)]
        mark(reaching, "out", self)
        if reaching:
            passes.due.add(self)

    def _begin_drawing(self) -> None:
        """Take the script's seed if no other model has; a loaded state brings that of its run."""
        if any(model.policy.draws for model in passes.alive):
            gc.collect()  # a model is in circles: those that the script has dropped go here
        if not any(model.policy.draws for model in passes.alive):
            PreparedModel.drawn = 0
            micro_batches.begin_step(self.forward_context.device, torch.initial_seed(), 0)

    def _share_seed(self, group: Any) -> None:
        """Take the first rank's seed on all: theirs may differ, and a checkpoint has one."""
        device = self.forward_context.device
        shared = torch.tensor(micro_batches.seed - 2**63, device=device)
        broadcast(shared, group=group, group_src=0)
        micro_batches.begin_step(device, int(shared) + 2**63, 0)

    def _draw(self) -> None:
        """Give the call a number of its own among all calls of all models on all ranks."""
        rank, ranks = (get_rank(), get_world_size()) if is_initialized() else (0, 1)
        micro_batches.begin(self.forward_context.device, PreparedModel.drawn + rank)
        PreparedModel.drawn += ranks

    def call_gathered(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module inside that has just gathered its weights, within a call of the model."""
        if self._audits:
            self._check_gathered(forward.module)
        with self.tensors.inside(forward.module, self._audits):
            return forward.compute_within(args, kwargs)

    @contextmanager
    def _in_mode(self, module: nn.Module, audits: bool) -> Iterator[None]:
        self._audits = audits
        if any(tuple(children_of(m).values()) != children for m, _, children in self.tensors.parts):
            self._build()
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                # In inference mode tensors count no versions, and the emulation sees no parts of a
                # batch norm.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            # Before the emulation, which would check each access and find nothing to do.
            stack.enter_context(self.tensors.inside(module, audits))
            stack.enter_context(self._hooks_outside())
            stack.enter_context(self._attributes_inside(audits))
            stack.enter_context(self.forward_context)
            stack.enter_context(self._losses)
            stack.enter_context(self.forward_context.autocast())
            stack.enter_context(self._in_state(_IN_MODE))
            if audits:
                stack.enter_context(self.audit.watching())
            yield

    @contextmanager
    def _in_state(self, state: int) -> Iterator[None]:
        before, self.state = self.state, state
        try:
            yield
        finally:
            self.state = before

    def _evaluate(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute in FP32: with the master weights, or with widened 16-bit weights."""
        with ExitStack() as stack:
            stack.enter_context(self._in_state(_EVALUATING))
            if self.stores_half:
                args, kwargs = each_tensor((args, kwargs), self._widened)
                stack.enter_context(CastModel(self.model, self.policy, {}).in_fp32())
            if self.policy.fp32_math != "ieee":
                stack.enter_context(ieee_fp32())
            return forward.plainly(*args, **kwargs)

    def _widened(self, tensor: Tensor) -> Tensor:
        # A state created like the parameters, such as an LSTM's, has their 16-bit dtype.
        return tensor.float() if tensor.dtype is self.policy.param_dtype else tensor

    @disable_dynamo
    def _inwards(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Cast an input to the mode's dtype; its gradient leaves unscaled, in the input's dtype."""
        if not tensor.is_floating_point():
            return tensor
        if dtype is None and self._casts:
            dtype = self.policy.param_dtype
        changes = self.scale is not None or dtype not in (None, tensor.dtype)
        if changes and tensor.requires_grad and is_grad_enabled():
            return make_nodes(self, "in", dtype, [tensor])[0]
        return tensor if dtype is None else tensor.to(dtype)

    @disable_dynamo
    def _outwards(self, tensor: Tensor) -> Tensor:
        """Widen an output to FP32; its gradient is scaled in FP32, then rounded."""
        is_half = tensor.is_floating_point() and tensor.dtype.itemsize == 2
        dtype = torch.float32 if is_half else None
        if tensor.grad_fn is not None:
            if self.scale is not None:
                return make_nodes(self, "out", dtype, [tensor])[0]
            mark([tensor], "out", self)
        return tensor if dtype is None else tensor.to(dtype)

    # Hooks of inner modules see the same tensors as without a mode: FP32, unscaled

    @contextmanager
    def _hooks_outside(self) -> Iterator[None]:
        hooked = []
        for module, _, _ in self.tensors.parts if self.tensors.changes else ():
            forward = module.__dict__.get("forward")
            if isinstance(forward, Forward) and _has_hooks(module):
                module.__dict__[CALL_WITH_HOOKS] = functools.partial(self._call_hooked, forward)
                hooked.append(module)
        try:
            yield
        finally:
            for module in hooked:
                del module.__dict__[CALL_WITH_HOOKS]

    def _call_hooked(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Call an inner module: its tensors go out to the hooks before, in to `forward`, out to the
        hooks after, and in again, each time in their previous dtypes."""
        dtypes: list[torch.dtype] = []

        def outwards(tensor: Tensor) -> Tensor:
            dtypes.append(tensor.dtype)
            return self._outwards(tensor)

        def inwards(tree: Any) -> Any:
            wanted = iter([*dtypes])
            dtypes.clear()
            return each_tensor(tree, lambda t: self._inwards(t, next(wanted, t.dtype)))

        def within(*given: Any) -> Any:
            return each_tensor(forward.compute(*inwards(given)), outwards)

        args, kwargs = each_tensor((args, kwargs), outwards)
        forward.around = within
        try:
            call = getattr(type(forward.module), CALL_WITH_HOOKS)
            outputs = call(forward.module, *args, **kwargs)
        finally:
            forward.around = None
        return inwards(outputs)

    # Tensors in attributes of modules: those from outside enter like inputs, those that a call
    # leaves there go out like outputs

    @contextmanager
    def _attributes_inside(self, audits: bool) -> Iterator[None]:
        """Let attributes hold the mode's tensors, and afterwards those seen from outside."""
        given = []
        self._come.clear()
        for _, place, key in self._places(audits):
            outer, known = place[key], self._left.get((id(place), key))
            if known is not None and known[0] is outer:
                place[key] = known[1]
            elif isinstance(outer, Tensor) and (outer.requires_grad or known is not None):
                # Only cast if the model itself has left a tensor there: a state carried on.
                kept = outer.dtype if known is None else known[1].dtype
                place[key] = inner = self._inwards(outer, kept)
                given.append((place, key, outer, inner))
        try:
            yield
        finally:
            for place, key, outer, inner in given:
                if place[key] is inner:
                    place[key] = outer
                    self._come.add((id(place), key))

    @disable_dynamo
    def _let_out(self, audits: bool) -> None:
        """Convert the tensors that the call has left in attributes for the outside."""
        for name, place, key in self._places(audits):
            inner = place[key]
            if (id(place), key) in self._come or not _has_graph(inner):
                continue
            outer = each_tensor(inner, lambda t: t if t.grad_fn is None else self._outwards(t))
            if isinstance(inner, tuple) or outer is not inner:
                place[key] = outer
                self._known[id(place), key] = name, place, key
                self._left[id(place), key] = outer, inner
                self.audit.left.add(name)

    def _places(self, audits: bool) -> list[tuple[str, Any, Any]]:
        """Return (name, place, key) of attributes that hold tensors which differ outside; without
        `audits` only those known to have held some."""
        if not (self._casts or self.scale is not None) or not is_grad_enabled():
            return []
        if not audits:
            found = [*self._known.values()]
            return [(n, p, k) for n, p, k in found if (k in p if type(p) is dict else k < len(p))]
        found = [
            place
            for name, module in self.model.named_modules()
            for key, value in module.__dict__.items()
            if key not in _NO_PLACES
            for place in _tensor_places(f"{name}.{key}" if name else key, module.__dict__, key)
        ]
        for name, place, key in found:
            if getattr(place[key], "requires_grad", False):
                self._known[id(place), key] = name, place, key
        return found

    # Backward passes and steps

    def on_pass(self, what: str) -> None:
        """Note that a gradient passes one of its nodes."""
        passes.on_pass(self, what)

    def end_step(self, found_inf: Tensor | None) -> None:
        """End an update; if it was skipped, restore the statistics from before its calls."""
        if self.guard is not None and self._guards_step and found_inf is not None:
            self.guard.restore_where(found_inf)
        self._guards_step = self.has_gradients = False
        self.partners.clear()

    def roll(self) -> None:
        """End an update of delayed scaling, once for all optimizers of an iteration."""
        if self.delayed is not None and self._rolled_at != self.calls:
            self._rolled_at = self.calls
            self.delayed.roll(self._largest)

    def _largest(self, values: Tensor) -> Tensor:
        if self.group is not None:
            all_reduce(values, ReduceOp.MAX, group=self.group)
        agree(values, self.parameters())
        return values

    # Copies

    def _deepcopied(self, memo: dict[int, Any]) -> nn.Module:
        if self.is_sharded:
            raise RuntimeError(
                "a prepared model is copied whose weights are sharded (fully_shard), which torch "
                "cannot do; copy it before fully_shard"
            )
        if self.state == _IN_MODE:
            raise RuntimeError(
                "a prepared model is copied within its own call, where it holds 16-bit copies of "
                "its weights; copy it between two calls"
            )
        kind = type(self.model)
        made = kind.__new__(kind)
        memo[id(self.model)] = made
        made.__setstate__(copy.deepcopy(self.model.__getstate__(), memo))
        other = PreparedModel(made, self.forward_context, self.loss_scale, self.overrides)
        if self.delayed is not None and other.delayed is not None:
            other.delayed.take_over(self.delayed.state_dict())
        return made

    # Refusals

    def _check(self, module: nn.Module, audits: bool) -> None:
        """Raise RuntimeError if the model is no longer the one that was prepared."""
        first = self._first
        if first.dtype is not self._dtype or first.device.type != self.device_type:
            self._refuse_moved(first)
        if not audits:
            return
        if not self.is_sharded:
            self._find_shards()
        if self.is_sharded:
            self._check_gathered(module)
            return
        for name, own in self.model.named_parameters():
            if name.endswith("_flat_param"):
                raise RuntimeError(FSDP1)
            refuse_spread(type(self.model).__name__, name, own)
            if not self.stores_half and own.is_floating_point() and own.dtype is not torch.float32:
                self._refuse_moved(own)

    def _check_gathered(self, module: nn.Module) -> None:
        for part, _, _ in self.tensors.shards[module]:
            for name, own in part.named_parameters(recurse=False):
                refuse_spread(type(part).__name__, name, own)
                if own.is_floating_point() and own.dtype is not torch.float32:
                    raise RuntimeError(
                        f"fully_shard gathers {type(part).__name__}.{name} in {own.dtype}; leave "
                        "param_dtype of its MixedPrecisionPolicy unset: the precision mode decides "
                        "on the dtype of each operation"
                    )

    def refuse_autocast(self) -> None:
        """Raise RuntimeError: torch.autocast is active."""
        raise RuntimeError(
            "torch.autocast is active around a model, or the backward pass of one, prepared as "
            f"precision={self.policy.name}; remove it: the precision mode decides on the dtype of "
            "each operation"
        )

    def _refuse_moved(self, now: Tensor) -> None:
        raise RuntimeError(
            f"the model was prepared on {self.device_type} in {self._dtype} and is now on "
            f"{now.device.type} in {now.dtype}; move and cast it before mprun.prepare, whose mode "
            "decides on the dtype of each operation"
        )


class Forward:
    """The `forward` of a module of a prepared model."""

    def __init__(self, shared: PreparedModel, module: nn.Module, plain: Any, inside: Any):
        # plain: the instance's previous `forward`; None: the method of its class.
        self.shared, self.module, self.plain = shared, module, plain
        # The function that computes in the mode; None: the one that computes outside.
        self.inside = None if inside is plain else inside
        self.was_called = False  # by code outside the model
        # Computes in its place while hooks are called.
        self.around: Callable[..., Any] | None = None
        functools.update_wrapper(self, type(module).forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.shared.state == _IN_MODE:
            if self.shared.tensors.shards and is_sharded(self.module):
                return self.shared.call_gathered(self, args, kwargs)
            return self.compute_within(args, kwargs)
        if self.shared.state == _EVALUATING:
            return self.plainly(*args, **kwargs)
        return self.shared.call(self, args, kwargs)

    def compute_within(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute inside the model."""
        return (self.around or self.compute)(args, kwargs)

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute in the mode."""
        return (self.plainly if self.inside is None else self.inside)(*args, **kwargs)

    def plainly(self, *args: Any, **kwargs: Any) -> Any:
        """Compute without the mode."""
        if self.plain is not None:
            return self.plain(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def plain_state(self) -> dict[str, Any]:
        """Return the module's state as a plain module has it, always in FP32."""
        kind: Any = type(self.module)
        state = {k: v for k, v in kind.__getstate__(self.module).items() if k not in _OWN}
        if self.plain is not None:
            state["forward"] = self.plain
        if not self.shared.stores_half:
            return state
        known: dict[int, Any] = {}

        def wide(own: Any) -> Any:
            """Return a 16-bit tensor in FP32, one tensor for all places that hold it."""
            if not isinstance(own, Tensor) or own.dtype is not self.shared.policy.param_dtype:
                return own
            if id(own) not in known:
                form: Tensor = own.detach().float()
                is_parameter = isinstance(own, nn.Parameter)
                known[id(own)] = nn.Parameter(form, own.requires_grad) if is_parameter else form
            return known[id(own)]

        state |= {name: {k: wide(own) for k, own in state[name].items()} for name in PLACES}
        if FLAT_WEIGHTS in state:
            state[FLAT_WEIGHTS] = [wide(own) for own in state[FLAT_WEIGHTS]]
        return state


class Watched(Forward):
    """The `forward` of a model in FP32, which is only watched and changes nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Each line costs about a microsecond when a step's kernels evict it from the caches.
        if not is_dynamo_compiling():
            shared = self.shared
            if is_autocast_enabled(shared.device_type):
                shared.refuse_autocast()
            if self.module.training or is_grad_enabled():
                if is_due(shared.calls) or is_initialized():
                    return shared.call(self, args, kwargs)
                shared.calls += 1
        if self.plain is not None:
            return self.plain(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def prepared_modules(model: nn.Module) -> dict[str, PreparedModel]:
    """Return module name -> prepared model, for all modules that belong to one."""
    found = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    return {name: own.shared for name, own in found.items() if isinstance(own, Forward)}


def _is_metric(module: nn.Module) -> bool:
    return any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__)


def _refuse_replica() -> None:
    raise RuntimeError(
        "nn.DataParallel copies a prepared model to several devices, which is impossible; use "
        "DistributedDataParallel around it"
    )


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of the user, not of measurements inside of the mode or of
    `fully_shard`, which hands values on as they are."""
    hooks = (hook for name in HOOKS for hook in getattr(module, name).values())
    return not all(getattr(hook, "sees_inside", False) or is_of_shards(hook) for hook in hooks)


def _tensor_places(name: str, place: Any, key: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the places with tensors: this one, or those of the list or dictionary in it."""
    value = place[key]
    if type(value) is list or type(value) is dict:
        for part in range(len(value)) if type(value) is list else [*value]:
            yield from _tensor_places(name, value, part)
    elif isinstance(value, Tensor) or type(value) is tuple:
        yield name, place, key


def _has_graph(value: Any) -> bool:
    parts = value if type(value) is tuple else (value,)
    return any(isinstance(part, Tensor) and part.grad_fn is not None for part in parts)


def each_tensor(tree: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Convert every tensor in `tree`: in tuples, lists, dictionaries, data classes and pytrees.

    Raises:
        RuntimeError: An object hides a tensor that needs conversion.
    """
    if isinstance(tree, Tensor):
        return convert(tree)
    if type(tree) is tuple or type(tree) is list:
        return type(tree)([each_tensor(part, convert) for part in tree])
    if type(tree) is dict:
        return {key: each_tensor(part, convert) for key, part in tree.items()}
    if tree is None or isinstance(tree, str | int | float):
        return tree
    if is_dataclass(tree) and not isinstance(tree, dict | type):
        parts = {f.name: getattr(tree, f.name) for f in fields(tree) if f.init}
        changed = {key: each_tensor(part, convert) for key, part in parts.items()}
        return replace(tree, **changed) if any(changed[k] is not parts[k] for k in parts) else tree
    return tree_map(lambda leaf: _converted(leaf, convert), tree)


def _converted(leaf: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return convert(leaf)
    parts = leaf.values() if isinstance(leaf, dict) else getattr(leaf, "__dict__", {}).values()
    for part in parts:
        if isinstance(part, Tensor) and (part.grad_fn is not None or convert(part) is not part):
            raise RuntimeError(
                f"a prepared model takes and returns tensors; in a {type(leaf).__name__} they "
                "would pass without a cast; pass and return tensors, and build it outside the model"
            )
    return leaf
