"""Observe one step: count all its tensors, change nothing.

Patterns choose the measured modules; a parameter belongs to the innermost chosen one around it.
Hooks only look: they return nothing, draw no random numbers and run under no_grad, outside the
modes that emulate 16-bit products. They exist only during the probed step.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from mprun.errors import BadInput
from mprun.numerics.exponent_counter import (
    OUTCOMES,
    Tally,
    largest,
    lost_updates,
    read_counts,
    sampled,
    sampling_stride,
)
from mprun.numerics.exponent_shares import BINS, AppliedUpdates, ExponentCounts
from mprun.numerics.operation_ranges import OperationRanges
from mprun.numerics.probe_record import KINDS, LearnerProbe, TensorStats
from mprun.numerics.state import Learner
from mprun.precision import DTYPE_NAMES
from mprun.precision.module_dtypes import called_in
from mprun.precision.rounded_weights import COMPENSATION
from mprun.precision.torch_update import BY_NUMBER, RULES, rule_of
from mprun.prepared import OptimizerSteps
from mprun.prepared.shards import local_of
from mprun.torch_private import (
    DisableTorchFunction,
    disable_dispatch_modes,
    graph_task,
    tree_leaves,
)

Chosen = dict[str, dict[str, nn.Module]]


def chosen_modules(learners: Mapping[str, Learner], patterns: Sequence[str]) -> Chosen:
    """Return learner -> module name -> module; BadInput for a pattern that matches no module.

    patterns: glob patterns over module names, as in precision.overrides; each must match in at
    least one of the models. Of a container that is never called the modules inside are probed, too.
    Without patterns: every module that has no modules inside.
    """
    names = {
        label: {name: module for name, module in learner.model.named_modules() if name}
        for label, learner in learners.items()
    }
    everything = [name for own in names.values() for name in own]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in everything):
            close = get_close_matches(pattern, everything, n=3, cutoff=0.0)
            raise BadInput(
                f"numerics.modules={pattern}: matches no module; some modules: {', '.join(close)}"
            )

    def found_in(own: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        if not patterns:
            return {name: module for name, module in own.items() if not any(module.children())}
        matched = [name for name in own if any(fnmatchcase(name, p) for p in patterns)]
        called = {inside for name in matched for inside in called_in(name, own[name])}
        return {name: module for name, module in own.items() if name in called.union(matched)}

    return {label: found_in(own) for label, own in names.items()}


def owner(parameter: str, chosen: Mapping[str, nn.Module]) -> str | None:
    """Return the innermost chosen module around the parameter of this name, or None."""
    while parameter:
        parameter = parameter.rpartition(".")[0]
        if parameter in chosen:
            return parameter
    return None


class Probe:
    """Watch one training step of `task` inside a `with` block; `read` returns the result.

    Only a part of a tensor with more than 2^18 values is counted (`sampling_stride`). A probe costs
    about two training steps of time and a copy of the counted weights; if these are updated in 16
    bits, also of their state and gradients (`UpdateMeter`).
    """

    def __init__(self, task, chosen: Chosen):
        self.task, self.chosen = task, chosen
        self.tally = Tally()
        # For each parameter: learner and module, values before the step, their stride, the tensor.
        self.before: list[tuple[tuple[str, str], Tensor, int, Tensor]] = []
        self.lost: dict[tuple[str, str], Tensor] = {}
        self.meters: dict[str, UpdateMeter] = {}
        self.applied: dict[tuple[str, str], Tensor] = {}
        self.ranges = OperationRanges(task, self.tally)
        self._places: dict[nn.Module, list[tuple[str, str]]] = {}  # -> learners and names
        self._handles: list = []
        self._gathered: set[int] = set()  # ids of whole weights of shards that are watched

    @torch.no_grad()
    def __enter__(self) -> "Probe":
        for name, learner in self.task.learners.items():
            steps, chosen = learner.steps, self.chosen[name]
            named = steps.named()
            is_sharded = any(model.is_sharded for model in steps.models)
            for module_name, module in chosen.items():
                self._places.setdefault(module, []).append((name, module_name))
                if is_sharded:
                    hook = partial(self._on_gathered, name, module_name)
                    self._handles.append(module.register_forward_pre_hook(hook))
            for parameter_name, parameter in named.items():
                inside, updated = owner(parameter_name, chosen), local_of(parameter)
                if inside is None or not updated.numel():  # a shard may be empty
                    continue
                hook = partial(self._on_gradient, (name, "weight_gradients", inside))
                if parameter.requires_grad and not is_sharded:  # a script may freeze it
                    self._handles.append(steps.watch_gradient(parameter, hook))
                stride = sampling_stride(updated)
                values = sampled(updated, stride).clone()
                self.tally.add_sample((name, "weights", inside), values, stride, largest(updated))
                self.before.append(((name, inside), values, stride, updated))
            names = [own for own in named if owner(own, chosen) is not None]
            self.meters[name] = UpdateMeter(steps, names)
        # Of all modules: a copy of the model would have its own hooks, and the probe in them.
        self._handles.append(register_module_forward_hook(self._on_output))
        self.ranges.__enter__()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.ranges.__exit__(kind, error, traceback)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if kind is None:
            self._count_updates()
            self.tally.finish()

    def _on_gathered(self, learner: str, name: str, module, inputs) -> None:
        """Count the gradients of whole weights, which exist for the length of a pass."""
        key = (learner, "weight_gradients", name)
        for own in module.parameters(recurse=False):
            if own.requires_grad and not hasattr(own, "to_local") and id(own) not in self._gathered:
                self._gathered.add(id(own))
                self._handles.append(own.register_hook(partial(self._on_gradient, key)))

    def _on_output(self, module, inputs, output) -> None:
        if graph_task() != -1:  # a block that is computed anew
            return
        for place in self._places.get(module, ()):
            self._count_output(*place, module, inputs, output)

    def _count_output(self, learner: str, name: str, module, inputs, output) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        with plainly():
            # What an FP8 product would cast, beside the weight and the output's gradient.
            if isinstance(module, nn.Linear) and inputs:
                self.tally.add((learner, "inputs", name), inputs[0])
            for tensor in tensors:
                self.tally.add((learner, "activations", name), tensor)
        # A tensor hook gets the gradient of exactly these values, even if the next module
        # overwrites them in place.
        hook = partial(self._on_gradient, (learner, "activation_gradients", name))
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(hook)

    def _on_gradient(self, key: tuple[str, str, str], gradient: Tensor | None) -> None:
        if gradient is None:  # of an unused result, beside others of one operation
            return
        with plainly():
            self.tally.add(key, gradient)

    @torch.no_grad()
    def _count_updates(self) -> None:
        asked, updates = [], []
        for (name, module), old, stride, updated in self.before:
            update = sampled(updated, stride).float() - old.float()
            self.tally.add_sample((name, "updates", module), update, stride, largest(update))
            narrow = self.task.learners[name].steps.narrow
            # Single updates do not show what such a store keeps on average.
            if narrow is None or narrow.rounding == "nearest":
                asked.append(((name, module), old, stride))
                updates.append(update)
        if updates:
            outcomes = lost_updates([old for _, old, _ in asked], updates)
            for (key, _, stride), counts in zip(asked, outcomes, strict=True):
                self.lost[key] = self.lost.get(key, 0) + counts * stride
        for name, meter in self.meters.items():
            for parameter, sums in meter.sums().items():
                key = name, owner(parameter, self.chosen[name]) or ""
                self.applied[key] = self.applied.get(key, 0) + sums
        self.before, self.meters = [], {}

    def read(self, scalars: Sequence[Tensor]) -> tuple[dict[str, LearnerProbe], list[float]]:
        """Return (learner -> measurements, 0-dim `scalars` as floats); wait for the device once."""
        tally, keys, count = self.tally, list(self.tally.counts), len(scalars)
        scalars = [*scalars, *self.ranges.scalars()]
        singles = [x.double() for x in (*(tally.amax[key] for key in keys), *scalars)]
        floats = torch.cat([torch.stack(singles), *self.applied.values()])
        integers = [*(tally.counts[key] for key in keys), *self.lost.values()]
        packed = torch.cat([*integers, floats.view(torch.int64)]).cpu()
        sizes = [BINS] * len(keys) + [OUTCOMES] * len(self.lost) + [len(floats)]
        *rows, last = packed.split(sizes)
        values, stats = last.view(torch.float64).tolist(), {}
        for key, row, amax in zip(keys, rows, values, strict=False):
            dtypes = "+".join(sorted(DTYPE_NAMES[dtype] for dtype in tally.dtypes[key]))
            stats[key] = TensorStats(ExponentCounts(row.numpy()), amax, dtypes, tally.strides[key])
        ends = len(keys) + len(scalars)
        sums = iter(values[ends:])
        applied = {key: AppliedUpdates(*islice(sums, 3)) for key in self.applied}
        outcomes = zip(self.lost, rows[len(keys) :], strict=True)
        lost = {key: read_counts(row.tolist()) for key, row in outcomes}
        between = self.ranges.read(stats, values[len(keys) + count : ends])

        def modules(of: Mapping[Any, Any], *start: str) -> dict[str, Any]:
            return {m: of[*start, m] for m in self.chosen[start[0]] if (*start, m) in of}

        learners = {
            name: LearnerProbe(
                loss_scale_names(self.task, name),
                {kind: modules(stats, name, kind) for kind in KINDS},
                modules(lost, name),
                None,
                modules(applied, name),
                *between[name],
            )
            for name in self.chosen
        }
        return learners, values[len(keys) : len(keys) + count]


def loss_scale_names(task, learner: str) -> tuple[str, ...]:
    """Return the names of the loss scales of one learner's losses, each once."""
    names = {id(scale): name for name, scale in task.loss_scales.items()}
    own = task.learners[learner].steps.loss_scales
    return tuple(dict.fromkeys(names[id(scale)] for scale in own))


@contextmanager
def plainly() -> Iterator[None]:
    """Disable gradients and the emulation, which would look at every operation."""
    with torch.no_grad(), DisableTorchFunction(), disable_dispatch_modes():
        yield


class UpdateMeter:
    """Compare the step that `optimizer` is about to take with the wanted one, see `AppliedUpdates`.

    It measures those of the parameters `names` that are updated in 16 bits by SGD without
    Nesterov's momentum (whose kernels may write to the gradient), or another of `BY_NUMBER`. These
    update each number independently, so a part of a large tensor is enough (`sampling_stride`). It
    costs a copy of that part, of its state and gradient.
    """

    def __init__(self, steps: OptimizerSteps, names: Collection[str]):
        self.steps, self.inner = steps, steps.optimizer
        # By the updated tensor's id: name, tensor, stride, and float64 copies of the counted part
        # of the weight (with its compensation) and of the state.
        self._before: dict[int, tuple[str, Tensor, int, Tensor, dict]] = {}
        if rule_of(self.inner) not in BY_NUMBER:
            return
        simple = [g["params"] for g in self.inner.param_groups if not g.get("nesterov")]
        taken = {id(parameter) for group in simple for parameter in group}
        for name, updated in steps.named().items():
            if name in names and id(updated) in taken and updated.dtype.itemsize == 2:
                stride = sampling_stride(updated)
                if steps.narrow is not None:
                    state = steps.narrow.widened(updated)
                else:
                    state = dict(self.inner.state.get(updated, {}))
                kept = {key: _copy(value, updated, stride) for key, value in state.items()}
                own = self._weight(updated, stride)
                self._before[id(updated)] = (name, updated, stride, own, kept)

    @torch.no_grad()
    def sums(self) -> dict[str, Tensor]:
        """Return name -> float64 [3] on the device, the fields of `AppliedUpdates`; 0 if skipped.

        Call it after the step and before the gradients are cleared.
        """
        gradients = self.steps.unscaled_gradients() if self._before else {}
        inner, groups, states = self.inner, [], {}
        measured: list[tuple[str, Tensor, int, Tensor, Tensor]] = []
        for group in inner.param_groups:
            copies = []
            for parameter in group["params"]:
                held = self._before.get(id(parameter))
                if held is None or held[0] not in gradients:
                    continue
                name, updated, stride, own, state = held
                copy, gradient = own.clone(), gradients[name]
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                copy.grad = sampled(gradient, stride).double()
                states[copy] = state
                copies.append(copy)
                measured.append((name, updated, stride, own, copy))
            if copies:
                groups.append({**group, "params": copies})
        rule = rule_of(inner)
        if not groups or rule is None:
            return {}
        # Another optimizer of the same type: a copy would include a user's hooks.
        twin = RULES[rule](groups)
        twin.state.update(states)
        twin.step()
        found = {}
        for name, updated, stride, own, copy in measured:
            wanted, applied = copy - own, self._weight(updated, stride) - own
            squares = (applied - wanted).square().sum() * stride**2
            sums = [(applied * wanted.sign()).sum() * stride, wanted.abs().sum() * stride, squares]
            found[name] = torch.stack(sums)
            if self.steps.scale.skips_nonfinite:
                found[name] = torch.where(self.steps.found_inf == 0, found[name], 0)
        return found

    def _weight(self, updated: Tensor, stride: int) -> Tensor:
        """Return float64 values, plus what the last rounding took away if that is kept."""
        values = sampled(updated, stride).double()
        kept = self.inner.state.get(updated, {}).get(COMPENSATION)
        return values if kept is None else values + sampled(kept, stride).double()


def _copy(value: object, updated: Tensor, stride: int) -> object:
    if not isinstance(value, Tensor):
        return value
    if value.shape == updated.shape and value.is_floating_point():
        return sampled(value, stride).double()
    return value.clone()
