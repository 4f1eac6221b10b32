"""Which part of its wanted update a 16-bit weight took: the bias of how weights are stored.

Wanted is what the same rule makes in float64 of the weight, its gradient and the optimizer's state
as they were; applied is by how much the stored weight moved. See `AppliedUpdates`.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from mprun.numerics.exponent_counter import sampled, sampling_stride
from mprun.precision import MixedPrecisionOptimizer
from mprun.precision.narrow_weights import COMPENSATION
from mprun.precision.torch_update import RULES, rule_of


class UpdateMeter:
    """Compares the step that `optimizer` is about to take with the one that is wanted.

        meter = UpdateMeter(optimizer, optimizer.names)
        ...  # the step
        sums = meter.sums()

    Measured are weights that are updated in 16 bits, of SGD without Nesterov's momentum (whose
    kernels may write to the gradient), Adam, AdamW and Adagrad, each number of which is updated
    for itself: of a large tensor a part is enough (`sampling_stride`). Costs a copy of that part,
    of its state and gradient. Of other weights nothing is kept and nothing told.

    Args:
        names: of parameters of the optimizer, those to measure.
    """

    def __init__(self, optimizer: MixedPrecisionOptimizer, names: Collection[str]):
        self.optimizer = optimizer
        # By the tensor that is updated: its name and stride, float64 copies of what is counted of
        # the weight (with its compensation) and the state, in which only numbers stay as they are.
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
        """Name -> float64 [3] on the device, the fields of `AppliedUpdates`; 0 of skipped steps.

        To be read after the step and before gradients are cleared; nothing waits for the device.
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
        # Another optimizer of the same type: a copy would bring the hooks of a user's along.
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
        """float64, with what the last rounding took away where that is kept."""
        values = sampled(updated, stride).double()
        kept = self.optimizer.inner.state.get(updated, {}).get(COMPENSATION)
        return values if kept is None else values + sampled(kept, stride).double()


def _copy(value: object, updated: Tensor, stride: int) -> object:
    if not isinstance(value, Tensor):
        return value
    if value.shape == updated.shape and value.is_floating_point():
        return sampled(value, stride).double()
    return value.clone()
