"""A plain PyTorch loop in FP32, TF32 or, as in tutorials, with a `.half()` or `.bfloat16()` model.

It follows the PyTorch tutorials "Training with PyTorch" (zero_grad, forward, loss, backward, step)
and "DCGAN Tutorial" (D on real, D on fake, update D, update G).
"""

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.suite.peers.equipment import Equipment, frozen, parameters_of, plain, tuned
from benchmarks.suite.peers.peer import Peer
from benchmarks.suite.peers.problems import Adversaries, Problem
from benchmarks.suite.peers.task import PeerTask
from mprun.data.source import Batch

WHOLE = {"fp16_naive": torch.float16, "bf16_naive": torch.bfloat16}


def make_loop(task: PeerTask) -> Peer:
    """Build a tutorial's loop; in the modes of `WHOLE` weights, images and codes have its dtype."""
    dtype = WHOLE.get(task.mode, torch.float32)
    for network in task.networks:
        network.to(dtype)
    return _peer(plain(task), dtype)


def make_tuned_loop(task: PeerTask, compiler: str | None = None) -> Peer:
    """Build the same with a fused optimizer and torch.compile; NHWC in TF32, where it is faster."""
    equipment = tuned(task, channels_last=task.mode == "tf32", compiler=compiler)
    return _peer(equipment, torch.float32)


def _peer(equipment: Equipment, input_dtype: torch.dtype) -> Peer:
    step = _gan_step if equipment.task.kind == "gan" else _step
    return Peer(equipment.task, equipment.settings, step(equipment, input_dtype))


def _step(equipment: Equipment, input_dtype: torch.dtype):
    problem, clip_norm = Problem(equipment.task), equipment.task.clip_norm
    problem.input_dtype = input_dtype
    (model,), (optimizer,) = equipment.networks, equipment.optimizers
    parameters = parameters_of(optimizer)

    def train(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(model, batch)
        loss.backward()
        if clip_norm is not None:
            clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
        return problem.reported(loss)

    return train


def _gan_step(equipment: Equipment, input_dtype: torch.dtype):
    adversaries, clip_norm = Adversaries(equipment.task), equipment.task.clip_norm
    adversaries.input_dtype = input_dtype
    generator, discriminator = equipment.networks
    optimizer_g, optimizer_d = equipment.optimizers
    of_g, of_d = parameters_of(optimizer_g), parameters_of(optimizer_d)

    def train(batch: Batch) -> Tensor:
        images = adversaries.images(batch[0])
        optimizer_d.zero_grad()
        loss_real = adversaries.against(discriminator(images), 1.0)
        loss_real.backward()
        fake = generator(adversaries.codes(images))
        loss_fake = adversaries.against(discriminator(fake.detach()), 0.0)
        loss_fake.backward()
        if clip_norm is not None:
            clip_grad_norm_(of_d, clip_norm)
        optimizer_d.step()

        optimizer_g.zero_grad()
        with frozen(of_d if equipment.freeze else []):
            loss_g = adversaries.against(discriminator(fake), 1.0)
            loss_g.backward()
        if clip_norm is not None:
            clip_grad_norm_(of_g, clip_norm)
        optimizer_g.step()
        return (loss_real + loss_fake).detach() + loss_g.detach()

    return train
