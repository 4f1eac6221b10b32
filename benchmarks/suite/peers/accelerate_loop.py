"""Hugging Face Accelerate around a plain loop.

It follows the page "Add Accelerate to your code" (prepare, accelerator.backward, clip_grad_norm_ of
the accelerator) with `mixed_precision`. Accelerate has no documented example of two networks: they
are in the order of the PyTorch DCGAN tutorial. The loss scale is updated in each optimizer's step,
not once per iteration.
"""

from accelerate import Accelerator
from torch import Tensor

from benchmarks.suite.peers.equipment import plain
from benchmarks.suite.peers.peer import Peer, SkipCount
from benchmarks.suite.peers.problems import Adversaries, Problem
from benchmarks.suite.peers.task import PeerTask
from mprun.data.source import Batch

PRECISION = {"fp32": "no", "tf32": "no", "amp": "fp16", "amp_bf16": "bf16"}


def make_accelerate(task: PeerTask) -> Peer:
    """Accelerate's autocast and GradScaler, one device, NCHW, torch's default optimizer.

    Its state belongs to the process: one precision per process.
    """
    precision = PRECISION[task.mode]
    accelerator = Accelerator(mixed_precision=precision, cpu=task.device.type == "cpu")
    equipment = plain(task)
    skips = SkipCount(equipment.optimizers) if task.mode == "amp" else None
    pairs = zip(equipment.networks, equipment.optimizers, strict=True)
    prepared = [accelerator.prepare(network, optimizer) for network, optimizer in pairs]
    step = _gan_step if task.kind == "gan" else _step
    settings = equipment.settings | {"precision": precision}
    return Peer(task, settings, step(task, accelerator, *prepared), skips)


def _step(task: PeerTask, accelerator: Accelerator, prepared):
    problem, (model, optimizer) = Problem(task), prepared

    def train(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(model, batch)
        accelerator.backward(loss)
        if task.clip_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
        return problem.reported(loss)

    return train


def _gan_step(task: PeerTask, accelerator: Accelerator, of_generator, of_discriminator):
    adversaries = Adversaries(task)
    (generator, optimizer_g), (discriminator, optimizer_d) = of_generator, of_discriminator

    def train(batch: Batch) -> Tensor:
        images, _ = batch
        optimizer_d.zero_grad()
        loss_real = adversaries.against(discriminator(images), 1.0)
        accelerator.backward(loss_real)
        fake = generator(adversaries.codes(images))
        loss_fake = adversaries.against(discriminator(fake.detach()), 0.0)
        accelerator.backward(loss_fake)
        if task.clip_norm is not None:
            accelerator.clip_grad_norm_(discriminator.parameters(), task.clip_norm)
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = adversaries.against(discriminator(fake), 1.0)
        accelerator.backward(loss_g)
        if task.clip_norm is not None:
            accelerator.clip_grad_norm_(generator.parameters(), task.clip_norm)
        optimizer_g.step()
        return (loss_real + loss_fake).detach() + loss_g.detach()

    return train
