"""torch's optimizers, made safe to skip.

It closes two traps of torch.optim. A fused SGD whose very first step is skipped keeps an
uninitialised momentum buffer and uses it afterwards (seen in torch 2.15). So state exists before
the first step. Optimizers without a fused kernel know no found_inf, so a step that must not count
is undone on the device. For optimizers whose state appears during their first step, or stays on the
host, the host decides, as torch.amp.GradScaler does: it waits for the device.
"""

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from mprun.precision.muon import Muon
from mprun.torch_private import (
    disable_dispatch_modes,
    has_kernel,
    sparse_indices,
    sparse_values,
)


class TensorFlowRMSprop(Optimizer):
    """RMSprop as tf.train.RMSPropOptimizer has it, tensor by tensor; nothing is on the host.

    Unlike torch's, eps is inside the root, the mean of squares starts at `initial_accumulator`, and
    the momentum buffer contains the rate.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.001,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        initial_accumulator: float = 1.0,
    ):
        rest = {"eps": eps, "weight_decay": weight_decay, "momentum": momentum, "foreach": False}
        super().__init__(params, {"lr": lr, "alpha": alpha, **rest})
        for own in held_by(self):
            # Both parts of a complex number, as of two weights.
            start = torch.full_like(_real(own), initial_accumulator)
            self.state[own] = {"square_avg": start, "momentum_buffer": torch.zeros_like(start)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for own in group["params"]:
                if own.grad is None:
                    continue
                mean, buffer = (self.state[own][key] for key in ("square_avg", "momentum_buffer"))
                weight, gradient = _real(own), _real(own.grad)
                if group["weight_decay"]:
                    gradient = gradient.add(weight, alpha=group["weight_decay"])
                mean.mul_(group["alpha"]).addcmul_(gradient, gradient, value=1 - group["alpha"])
                root = mean.add(group["eps"]).sqrt_()
                buffer.mul_(group["momentum"]).addcdiv_(gradient * group["lr"], root)
                weight.sub_(buffer)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


RULES: dict[str, type[Any]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW, "adagrad": Adagrad}
RULES |= {"rmsprop": RMSprop, "rmsprop_tensorflow": TensorFlowRMSprop, "muon": Muon}
# Rules that move each number of a weight by itself, so that a part of a weight is enough.
BY_NUMBER = tuple(rule for rule in RULES if rule != "muon")
# The state that a rule with kernels (torch's, mprun's) moves, in the order in which they take it.
STATE: dict[str | None, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
}


def rule_of(optimizer: Optimizer) -> str | None:
    """Return its name among `RULES`; None for another optimizer."""
    # By the exact type: in Python AdamW is a kind of Adam.
    return next((rule for rule, kind in RULES.items() if type(optimizer) is kind), None)


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [own for group in optimizer.param_groups for own in group["params"]]


def moved_by(optimizer: Optimizer, without: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return the tensors that a step can change: parameters, and their state on the same device.

    Adagrad and RMSprop keep their counter on the host, where only Adagrad's lr_decay needs it.
    Undoing it would make the host wait for the device.

    without: parameters that do not count.
    """
    left_out = {*map(id, without)}
    return [
        value
        for own in held_by(optimizer)
        if id(own) not in left_out
        for value in (own, *optimizer.state[own].values())
        if isinstance(value, Tensor) and value.device == own.device
    ]


def moves_used_rows_alone(optimizer: Optimizer) -> bool:
    """Return whether a gradient of zeros moves nothing: sparse ones then move the used rows."""
    if not isinstance(optimizer, SGD | Adagrad):
        return False
    moving = ("momentum", "weight_decay", "lr_decay")
    return not any(group.get(name) for group in optimizer.param_groups for name in moving)


_ADAM = {"exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad"}
_RMSPROP = {"square_avg": None, "momentum_buffer": "momentum", "grad_avg": "centered"}
# State -> the setting that needs it, if not all do.
_CREATED: dict[type, dict[str, str | None]] = {Adam: _ADAM, AdamW: _ADAM, RMSprop: _RMSPROP}


def initialise_state(optimizer: Optimizer, *, graded: bool = False) -> None:
    """Create the state tensors that torch's optimizers of `RULES` would create on a first step.

    Zero momentum equals torch's first step (buffer = gradient) if dampening is 0. With another
    dampening, and for other optimizers, no state exists before their first step.

    graded: only of parameters with a gradient, as torch does: others may be frozen for ever.
    """
    if isinstance(optimizer, Muon):
        optimizer.initialise_state()
    kind = type(optimizer)  # a subclass may keep more
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if graded and parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if kind is SGD and group["momentum"] and not group["dampening"] and not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            elif kind in _CREATED and not state:
                on_device = group.get("fused") or group["capturable"]
                device = parameter.device if on_device else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                for name, setting in _CREATED[kind].items():
                    if setting is None or group[setting]:
                        state[name] = torch.zeros_like(parameter)


def creates_late(optimizer: Optimizer) -> bool:
    """Return whether `initialise_state` leaves state to be created on the first step."""
    return rule_of(optimizer) is None or any(g.get("dampening") for g in optimizer.param_groups)


def create_state(optimizer: Optimizer, parameter: Tensor, saved: Mapping[str, Any]) -> None:
    """Create the state that an optimizer creates on its first step, as it was `saved`.

    torch keeps counters on the host, unless the group is fused or capturable.
    """
    [group] = (g for g in optimizer.param_groups if any(parameter is p for p in g["params"]))
    on_device = group.get("fused") or group.get("capturable")
    state = optimizer.state[parameter]
    for key, value in saved.items():
        if isinstance(value, Tensor):
            is_counter = not value.dim() and parameter.dim() and not on_device
            value = value.to("cpu" if is_counter else parameter.device, copy=True)
        state[key] = value


def reads_rate_on_device(optimizer: Optimizer) -> bool:
    """Return whether a rate that is a tensor is never waited for (torch 2.11 to 2.15).

    torch's other implementations of SGD and Adagrad, and its loop of RMSprop, read its value on the
    host.
    """
    groups = optimizer.param_groups
    at_once = isinstance(optimizer, RMSprop) and all(group["foreach"] for group in groups)
    counts = isinstance(optimizer, Adam | Muon) or at_once
    counts = counts and all(group.get("capturable") for group in groups)
    return counts or isinstance(optimizer, TensorFlowRMSprop) or is_fused(optimizer)


def path_of(optimizer: Optimizer) -> str:
    """Return which of torch's implementations an optimizer runs; "default": torch chooses."""
    if is_fused(optimizer):
        return "fused"
    chosen = [group.get("foreach") for group in optimizer.param_groups]
    if all(chosen):
        return "foreach"
    return "default" if None in chosen else "loop"


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether every group runs torch's fused kernel, which takes found_inf and skips."""
    is_torchs = isinstance(optimizer, SGD | Adam | Adagrad)
    return is_torchs and all(group.get("fused") for group in optimizer.param_groups)


@contextmanager
def skipping(optimizer: Optimizer, found_inf: Tensor) -> Iterator[None]:
    """Let a step of `optimizer` within it move nothing if `found_inf`, float32, 0-dim, is not 0.

    The optimizer's own step runs in any case:

        fused kernels       read found_inf, and skip by themselves
        the host decides    gradients are hidden: on a CPU, where reading the flag costs nothing,
                            and where a step could not be undone on the device
        all others          what they move is copied, and put back on the device; values of sparse
                            gradients are 0
    """
    sparse = [own for own in held_by(optimizer) if own.grad is not None and own.grad.is_sparse]
    waits = _is_on_host(found_inf) or (sparse and not moves_used_rows_alone(optimizer))
    if is_fused(optimizer) and len(optimizer.state) < len(held_by(optimizer)):
        initialise_state(optimizer, graded=True)
    with ExitStack() as stack:
        if is_fused(optimizer) and not host_decides(optimizer):
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # not in torch's stub
            stack.callback(optimizer.__dict__.pop, "found_inf", None)
        elif waits or host_decides(optimizer):
            if not waits:
                _say_that_it_waits(optimizer)
            if found_inf.item():
                stack.enter_context(without_gradients(optimizer))
        else:
            for own in sparse:  # a copy of the table would be needed to undo the step
                stack.enter_context(_zeros_where(found_inf, own))
            stack.enter_context(put_back_where(found_inf, moved_by(optimizer, without=sparse)))
        yield


def _is_on_host(flag: Tensor) -> bool:
    return flag.device.type == "cpu"


@contextmanager
def without_gradients(optimizer: Optimizer) -> Iterator[None]:
    """Hide the gradients: torch's optimizers then change nothing, not even counters.

    Other optimizers count in their groups, which are put back.
    """
    hidden = [(own, own.grad) for own in held_by(optimizer)]
    groups = [(group, {**group}) for group in optimizer.param_groups]
    for own, _ in hidden:
        own.grad = None
    try:
        yield
    finally:
        for own, gradient in hidden:
            own.grad = gradient
        for group, before in groups:
            group.update(before)


@contextmanager
def _zeros_where(found_inf: Tensor, own: Tensor) -> Iterator[None]:
    """Let a sparse gradient be 0 if `found_inf` is not: the rows of its parameter then stay."""
    whole = own.grad
    assert whole is not None
    own.grad = torch.sparse_coo_tensor(
        sparse_indices(whole),
        torch.where(found_inf != 0, 0.0, sparse_values(whole)),
        whole.shape,
        is_coalesced=whole.is_coalesced(),
        check_invariants=False,  # which would wait
    )
    try:
        yield
    finally:
        own.grad = whole


@contextmanager
@torch.no_grad()
def put_back_where(found_inf: Tensor | None, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let code within it write to `tensors`; undo that if `found_inf` (0-dim) is not 0.

    It works on the device and does not wait; with None nothing is undone.
    """
    if found_inf is None:
        yield
        return
    # Of a sharded tensor the part of this process.
    tensors = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    before = [tensor.clone() for tensor in tensors]
    yield
    skipped = found_inf != 0
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(skipped, old, tensor))


def host_decides(optimizer: Optimizer) -> bool:
    """Return whether a step can be neither skipped nor undone on the device.

    The reason is state that is still to appear, or that is no device tensor (a counter on the host,
    or a plain number). Optimizers from elsewhere may keep state in other places, or replace it."""
    known = rule_of(optimizer)
    if is_fused(optimizer) and not any(group.get("dampening") for group in optimizer.param_groups):
        return False  # created before the first step, on the device
    if known is None and not type(optimizer).__module__.startswith("torch.optim"):
        return True
    for group in optimizer.param_groups:
        if known in ("adagrad", "rmsprop") and not group.get("lr_decay"):
            continue  # its counter is not needed
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            keeps_none = known == "sgd" and not group["momentum"]
            if parameter.grad is not None and not state and not keeps_none:
                return True
            devices = [getattr(v, "device", None) for v in state.values() if v is not None]
            if any(device != parameter.device for device in devices):
                return True
    return False


_waiting: WeakSet[Optimizer] = WeakSet()  # of which it was said


def _say_that_it_waits(optimizer: Optimizer) -> None:
    # Before its first applied step state is still to appear.
    if optimizer in _waiting or not any(optimizer.state.values()):
        return
    _waiting.add(optimizer)
    accepts = inspect.signature(type(optimizer)).parameters
    remedies = [f"{name}=True" for name in ("fused", "capturable") if name in accepts]
    remedy = f"; with {' or '.join(remedies)} it does not" if remedies else ""
    print(
        f"mprun: {type(optimizer).__name__}: each step waits for the device, because only the host "
        f"can skip it{remedy}",
        file=sys.stderr,
    )


@functools.cache
def has_fused_kernel(kind: str, device: torch.device) -> bool:
    """Return whether this torch has a fused kernel of a rule, one of `STATE`.

    One step of one element per process decides: torch 2.11 has the kernel of Adagrad on CUDA and an
    optimizer that refuses to call it. Without a CUDA device (there a roofline can be counted) the
    answer is that of torch's build.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        return has_kernel(f"aten::_fused_{kind}_", "CUDA")
    try:
        with disable_dispatch_modes():  # a real step, also within what traces or counts
            weight = torch.zeros(1, device=device, requires_grad=True)
            weight.grad = torch.zeros_like(weight)
            RULES[kind]([weight], lr=0.0, fused=True).step()
    except (RuntimeError, TypeError) as error:
        if "out of memory" in str(error):  # says nothing about the kernel; the answer is cached
            raise
        return False
    return True


_granted = False


def take_for_granted() -> None:
    """Count the kernels as tested in this process: for a device without any values."""
    global _granted
    _granted = True


def is_granted() -> bool:
    """Return whether kernels count as tested, see `take_for_granted`."""
    return _granted
