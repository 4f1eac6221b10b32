"""The shadow step: the same batch from the same weights in FP32, beside the mode's own step.

Two training curves that part say that rounding changed something, not how much: training is
chaotic, and any difference grows. One step from equal weights tells what rounding did to it. The
task's own `train_step` computes it, on a twin of the task whose models are FP32 copies of the
master weights and whose optimizers only collect gradients. Random numbers are those of the mode's
step, so dropout masks and generator inputs are the same.
"""

import copy
from typing import cast

import torch
from torch import Tensor, nn

from mprun.numerics.probe import Chosen, owner
from mprun.numerics.probe_record import Agreement
from mprun.precision import (
    BatchNormGuard,
    CastModel,
    ForwardContext,
    MixedPrecisionOptimizer,
    NoLossScale,
    Update,
    fp32_copy,
    get_policy,
    ieee_fp32,
)
from mprun.precision.random_states import random_states, restore_random_states
from mprun.tasks import GAN, LanguageModel, TrainState

# Before these names of metrics stands which learner of a GAN they are of.
_PREFIX = {"generator": "g_", "discriminator": "d_"}


class Shadow:
    """Runs one training step of `task` a second time, in FP32; the task does not notice.

        with Shadow(task, chosen) as shadow:
            metrics = task.train_step(index)
        loss = shadow.run(index, metrics)
        agreements = shadow.read()

    chosen: the modules to compare, from `chosen_modules`. In a GAN the generator is compared
    against the discriminator as the mode's own step has just updated it. Costs an FP32 step, an
    FP32 copy of the models with gradients, and a copy of the mode's gradients.
    """

    def __init__(self, task, chosen: Chosen):
        self.task, self.chosen = task, chosen
        self.device = task.arithmetic.device
        self.own: dict[str, dict[str, Tensor]] = {}
        self.sums: dict[tuple[str, str], Tensor] = {}

    def __enter__(self) -> "Shadow":
        self.random = random_states(self.device)
        # Copies of the weights and of the carried state as they are before the step.
        self.twin = _twin(self.task, self.device)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            for name, learner in self.task.learners.items():
                gradients = learner.optimizer.unscaled_gradients()
                self.own[name] = {own: value.float() for own, value in gradients.items()}

    def run(self, index: int, metrics: dict[str, Tensor]) -> Tensor:
        """Take the step in FP32 and compare; its loss as a 0-dim tensor.

        index: the one the task's own step had; metrics: what that returned.
        """
        afterwards = random_states(self.device)
        restore_random_states(self.random, self.device)
        try:
            with ieee_fp32():
                loss = self.twin.train_step(index)["loss"]
        finally:
            restore_random_states(afterwards, self.device)
        for name, learner in self.twin.learners.items():
            clip, factor = self.task.learners[name].optimizer.clip_norm, None
            if clip is not None:
                norm = metrics[f"{_PREFIX.get(name, '')}grad_norm"]
                factor = (clip / (norm + 1e-6)).clamp(max=1.0)
            self._compare(name, learner.optimizer.gradients, factor)
        return loss

    def read(self) -> dict[str, dict[str, Agreement]]:
        """TrainState -> module -> agreement; waits for the device, in one transfer."""
        names: dict[str, dict[str, Agreement]] = {name: {} for name in self.chosen}
        if self.sums:
            rows = torch.stack(list(self.sums.values())).tolist()
            for (name, module), row in zip(self.sums, rows, strict=True):
                names[name][module] = Agreement(*row)
        return names

    @torch.no_grad()
    def _compare(self, name: str, fp32: dict[str, Tensor], factor: Tensor | None) -> None:
        own = self.own.pop(name)
        for parameter, reference in fp32.items():
            module = owner(parameter, self.chosen[name])
            if module is None or parameter not in own:
                continue
            # In float64: squares of gradients below 2^-75 are 0 in FP32.
            gradient, reference = own[parameter].double(), reference.double()
            if factor is not None:
                gradient = gradient / factor  # what clipping did is undone
            sums = torch.stack(
                [
                    (gradient * reference).sum(),
                    gradient.square().sum(),
                    reference.square().sum(),
                    (gradient - reference).square().sum(),
                ]
            )
            self.sums[name, module] = self.sums.get((name, module), 0) + sums


class _Gradients:
    """In place of an optimizer: collects gradients, and moves the model where the mode's own went.

    A generator's loss is computed after the discriminator's update, and it has to be the same one.
    """

    def __init__(self, module: nn.Module, own):
        self.parameters = dict(module.named_parameters())
        self.own = own
        self.gradients: dict[str, Tensor] = {}
        self.one = torch.ones((), device=own.parameters[0].device)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def backward(self, loss: Tensor, loss_index: int = 0) -> None:
        loss.backward()

    @torch.no_grad()
    def step(self, measure_norm: bool = False) -> Update:
        self.gradients = {
            name: parameter.grad
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }
        for name, updated in zip(self.own.names, self.own.updated, strict=True):
            self.parameters[name].copy_(updated)
        return Update(self.one, None, None)


def _twin(task, device: torch.device):
    """The same task in FP32 on copies of its models; it shares the data."""
    policy = get_policy("fp32")
    twin = copy.copy(task)
    twin.policy, twin.arithmetic = policy, ForwardContext(policy, device)
    twin.learners = {}
    for name, learner in task.learners.items():
        model = fp32_copy(learner.build_model, learner.cast, learner.optimizer.masters)
        gradients = _Gradients(model, learner.optimizer)
        # Of an optimizer it has what a training step calls.
        optimizer = cast(MixedPrecisionOptimizer, gradients)
        twin.learners[name] = TrainState(
            CastModel(model, policy, {}), optimizer, learner.build_model
        )
    if isinstance(task, GAN):
        twin.g, twin.d = twin.learners["generator"], twin.learners["discriminator"]
        twin.discriminator_guard = BatchNormGuard(twin.d.model)
        twin.loss_scales = {}
    else:
        twin.learner = twin.learners["model"]
        twin.loss_scale = NoLossScale(device)
    if isinstance(task, LanguageModel) and task.hidden is not None:
        twin.hidden = tuple(part.detach().float() for part in task.hidden)
    return twin
