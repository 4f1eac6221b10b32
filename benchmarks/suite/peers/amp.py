"""The documented torch.amp recipe, unchanged and tuned.

It follows the PyTorch notes "Automatic Mixed Precision examples": "Typical Mixed Precision
Training", "Gradient clipping" (unscale_ before it), and "Working with Multiple Models, Losses, and
Optimizers" (one scaler; `update` once, after the steps of all optimizers). All settings are
defaults: GradScaler's numbers are those of scaler=dynamic, except floor and ceiling. In BF16 there
is no scaler, as in the notes on autocast; FP8 layers choose their format themselves.
"""

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.suite.peers.equipment import Equipment, frozen, parameters_of, plain, tuned
from benchmarks.suite.peers.peer import Peer, SkipCount
from benchmarks.suite.peers.problems import Adversaries, Problem
from benchmarks.suite.peers.task import PeerTask
from mprun.data.source import Batch

AUTOCAST = {"amp": torch.float16, "amp_bf16": torch.bfloat16}
AUTOCAST |= dict.fromkeys(("fp8_tensorwise", "fp8_rowwise"), torch.bfloat16)


def make_amp(task: PeerTask) -> Peer:
    """Build the documented recipe: NCHW, the optimizer implementation that torch chooses."""
    return _peer(plain(task))


def make_tuned_amp(task: PeerTask, compiler: str | None = None) -> Peer:
    """Build the recipe with NHWC, a fused optimizer and torch.compile."""
    return _peer(tuned(task, channels_last=True, compiler=compiler))


def _peer(equipment: Equipment) -> Peer:
    task = equipment.task
    # Without scaling it passes losses and optimizers through, as documented for `enabled`.
    scaler = torch.amp.GradScaler(task.device.type, enabled=task.mode == "amp")
    skips = SkipCount(equipment.optimizers) if scaler.is_enabled() else None
    step = _gan_step if task.kind == "gan" else _step
    return Peer(task, equipment.settings, step(equipment, scaler), skips)


def _step(equipment: Equipment, scaler: torch.amp.GradScaler):
    task, problem = equipment.task, Problem(equipment.task)
    (model,), (optimizer,) = equipment.networks, equipment.optimizers
    parameters, dtype = parameters_of(optimizer), AUTOCAST[task.mode]

    def train(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device_type=task.device.type, dtype=dtype):
            loss = problem.loss(model, batch)
        scaler.scale(loss).backward()
        if task.clip_norm is not None:
            scaler.unscale_(optimizer)
            clip_grad_norm_(parameters, task.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        return problem.reported(loss)

    return train


def _gan_step(equipment: Equipment, scaler: torch.amp.GradScaler):
    task, adversaries = equipment.task, Adversaries(equipment.task)
    generator, discriminator = equipment.networks
    optimizer_g, optimizer_d = equipment.optimizers
    of_g, of_d = parameters_of(optimizer_g), parameters_of(optimizer_d)
    dtype = AUTOCAST[task.mode]

    def autocast():
        return torch.autocast(device_type=task.device.type, dtype=dtype)

    def step(optimizer: torch.optim.Optimizer, parameters) -> None:
        if task.clip_norm is not None:
            scaler.unscale_(optimizer)
            clip_grad_norm_(parameters, task.clip_norm)
        scaler.step(optimizer)

    def train(batch: Batch) -> Tensor:
        images, _ = batch
        optimizer_d.zero_grad()
        with autocast():
            loss_real = adversaries.against(discriminator(images), 1.0)
        scaler.scale(loss_real).backward()
        with autocast():
            fake = generator(adversaries.codes(images))
            loss_fake = adversaries.against(discriminator(fake.detach()), 0.0)
        scaler.scale(loss_fake).backward()
        step(optimizer_d, of_d)

        optimizer_g.zero_grad()
        with frozen(of_d if equipment.freeze else []):
            with autocast():
                loss_g = adversaries.against(discriminator(fake), 1.0)
            scaler.scale(loss_g).backward()
        step(optimizer_g, of_g)
        scaler.update()
        return (loss_real + loss_fake).detach() + loss_g.detach()

    return train
