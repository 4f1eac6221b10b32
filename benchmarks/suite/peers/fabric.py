"""Lightning Fabric around a plain loop.

It follows the pages "Convert PyTorch code to Fabric", "Save memory with mixed precision" and
"Methods" (clip_gradients), and for two networks the Fabric DCGAN example of the Lightning
repository. There the loss scale is updated after each optimizer's step, not once per iteration.
"""

import logging

from lightning.fabric import Fabric
from torch import Tensor

from benchmarks.suite.peers.equipment import plain
from benchmarks.suite.peers.peer import Peer, SkipCount
from benchmarks.suite.peers.problems import Adversaries, Problem
from benchmarks.suite.peers.task import PeerTask
from mprun.data.source import Batch

PRECISION = {"fp32": "32-true", "tf32": "32-true", "amp": "16-mixed", "amp_bf16": "bf16-mixed"}


def make_fabric(task: PeerTask) -> Peer:
    """Fabric's precision plugin and GradScaler, one device, NCHW, torch's default optimizer."""
    # It logs the visible GPUs, and that TF32 would be faster.
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    accelerator = "gpu" if task.device.type == "cuda" else "cpu"
    precision = PRECISION[task.mode]
    fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
    fabric.launch()
    equipment = plain(task)
    skips = SkipCount(equipment.optimizers) if task.mode == "amp" else None
    pairs = zip(equipment.networks, equipment.optimizers, strict=True)
    prepared = [fabric.setup(network, optimizer) for network, optimizer in pairs]
    step = _gan_step if task.kind == "gan" else _step
    settings = equipment.settings | {"precision": precision}
    return Peer(task, settings, step(task, fabric, *prepared), skips)


def _step(task: PeerTask, fabric: Fabric, prepared):
    problem, (model, optimizer) = Problem(task), prepared

    def train(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(model, batch)
        fabric.backward(loss)
        if task.clip_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=task.clip_norm)
        optimizer.step()
        return problem.reported(loss)

    return train


def _gan_step(task: PeerTask, fabric: Fabric, of_generator, of_discriminator):
    adversaries = Adversaries(task)
    (generator, optimizer_g), (discriminator, optimizer_d) = of_generator, of_discriminator

    def train(batch: Batch) -> Tensor:
        images, _ = batch
        optimizer_d.zero_grad()
        loss_real = adversaries.against(discriminator(images), 1.0)
        fabric.backward(loss_real)
        fake = generator(adversaries.codes(images))
        loss_fake = adversaries.against(discriminator(fake.detach()), 0.0)
        fabric.backward(loss_fake)
        if task.clip_norm is not None:
            fabric.clip_gradients(discriminator, optimizer_d, max_norm=task.clip_norm)
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = adversaries.against(discriminator(fake), 1.0)
        fabric.backward(loss_g)
        if task.clip_norm is not None:
            fabric.clip_gradients(generator, optimizer_g, max_norm=task.clip_norm)
        optimizer_g.step()
        return (loss_real + loss_fake).detach() + loss_g.detach()

    return train
