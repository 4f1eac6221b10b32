"""Measure which part of its wanted update a 16-bit weight took: the bias of the weight storage.

The wanted update is what the same rule computes in float64 from the weight, its gradient and the
optimizer's state before the step. The applied update is how far the stored weight moved. See
`AppliedUpdates`.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from mprun.numerics.exponent_counter import sampled, sampling_stride
from mprun.precision import MixedPrecisionOptimizer
from mprun.precision.rounded_weights import COMPENSATION
from mprun.precision.torch_update import RULES, rule_of


class UpdateMeter:
    """Compare the step that `optimizer` is about to take with the wanted one.

        meter = UpdateMeter(optimizer, optimizer.names)
        ...  # the step
        sums = meter.sums()

    It measures weights that are updated in 16 bits by SGD without Nesterov's momentum (whose
    kernels may write to the gradient), Adam, AdamW or Adagrad. These update each number
    independently, so a part of a large tensor is enough (`sampling_stride`). It costs a copy of
    that part, of its state and gradient. Other weights are neither kept nor reported.

    Args:
        names: the optimizer's parameters to measure.
    """

    def __init__(self, optimizer: MixedPrecisionOptimizer, names: Collection[str]):
        self.optimizer = optimizer
        # By the updated tensor's id: name, tensor, stride, and float64 copies of the counted part
        # of the weight (with its compensation) and of the state, whose plain numbers stay as they
        # are.
        self._before: dict[int, tuple[str, Tensor, int, Tensor, dict]] = {}
        if rule_of(optimizer.inner) is None:
            return
        simple = [g["params"] for g in optimizer.inner.param_groups if not g.get("nesterov")]
        taken = {id(parameter) for group in simple for parameter in group}
        for name, updated in zip(optimizer.names, optimizer.updated, strict=True):
            if name in names and id(updated) in taken and updated.dtype.itemsize == 2:
                stride = sampling_stride(updated)
                state = optimizer.inner.state.get(updated, {})
                own = self._weight(updated, stride)
                kept = {
                    key: _copy(value, updated, stride)
                    for key, value in state.items()
                    if key != COMPENSATION
                }
                self._before[id(updated)] = (name, updated, stride, own, kept)

    @torch.no_grad()
    def sums(self) -> dict[str, Tensor]:
        """Return name -> float64 [3] on the device, the fields of `AppliedUpdates`; 0 if skipped.

        Call it after the step and before the gradients are cleared; it does not wait for the
        device.
        """
        gradients = self.optimizer.unscaled_gradients() if self._before else {}
        inner, groups, states = self.optimizer.inner, [], {}
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
            if self.optimizer.skips:
                taken = self.optimizer.found_inf == 0
                found[name] = torch.where(taken, found[name], 0)
        return found

    def _weight(self, updated: Tensor, stride: int) -> Tensor:
        """Return float64 values, plus what the last rounding took away if that is kept."""
        values = sampled(updated, stride).double()
        kept = self.optimizer.inner.state.get(updated, {}).get(COMPENSATION)
        return values if kept is None else values + sampled(kept, stride).double()


def _copy(value: object, updated: Tensor, stride: int) -> object:
    if not isinstance(value, Tensor):
        return value
    if value.shape == updated.shape and value.is_floating_point():
        return sampled(value, stride).double()
    return value.clone()
