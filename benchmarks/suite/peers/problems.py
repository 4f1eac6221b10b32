"""The loss of each kind of task, as in a tutorial; a step in which a tool has the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.suite.peers.task import PeerTask
from mprun.data.source import Batch


class Problem:
    """Classification, reconstruction or language modelling: one model, one loss.

    `loss(model, batch)` returns the propagated loss, 0-dim float32; `reported` turns it into the
    loss of mprun's records. input_dtype: dtype of images, float16 for a float16 model. A language
    model's state is carried from batch to batch, detached, and starts from zero in each epoch.
    """

    def __init__(self, task: PeerTask):
        self.kind, model = task.kind, task.config.model
        self.input_dtype = torch.float32
        self.label_smoothing = getattr(model, "label_smoothing", 0.0)
        self.sampled = getattr(model, "sampled_softmax", None) is not None
        self.sums_over_time = getattr(model, "time_reduction", "mean") == "sum"
        self.batches_per_epoch, self.steps = task.batches_per_epoch, 0
        self.hidden: tuple[Tensor, Tensor] | None = None
        self.factor = 1  # propagated loss / reported loss

    def loss(self, model, batch: Batch) -> Tensor:
        if self.kind == "language_model":
            return self._language_model(model, *batch)
        images, labels = batch
        outputs = model(images.to(self.input_dtype)).float()
        if self.kind == "reconstruction":
            return F.mse_loss(outputs, images)
        return F.cross_entropy(outputs, labels, label_smoothing=self.label_smoothing)

    def reported(self, loss: Tensor) -> Tensor:
        return loss.detach() if self.factor == 1 else loss.detach() / self.factor

    def _language_model(self, model, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.steps % self.batches_per_epoch == 0:
            self.hidden = None
        self.steps += 1
        if self.sampled:
            losses, hidden = model(tokens, targets, self.hidden)
            loss = losses.mean()
        else:
            logits, hidden = model(tokens, self.hidden)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        self.hidden = tuple(part.detach() for part in hidden)
        if self.sums_over_time:
            self.factor = len(tokens)
            return loss * self.factor
        return loss


class Adversaries:
    """DCGAN's three losses on logits, real = 1 and fake = 0, as in the PyTorch example.

    input_dtype: dtype of images and codes, float16 for float16 networks.
    """

    def __init__(self, task: PeerTask):
        self.latent_size, self.device = task.config.model.latent_size, task.device
        self.input_dtype = torch.float32

    def codes(self, images: Tensor) -> Tensor:
        """Draw as many random codes as images from torch's global generator."""
        codes = torch.randn(len(images), self.latent_size, device=self.device)
        return codes.to(self.input_dtype)

    def images(self, images: Tensor) -> Tensor:
        return images.to(self.input_dtype)

    def against(self, logits: Tensor, label: float) -> Tensor:
        """Return the binary cross-entropy of [batch] logits against one label, 0-dim float32."""
        logits = logits.float()
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


def through_tool(
    task: PeerTask,
    prepared: Sequence[Sequence[Any]],
    backward: Callable[[Tensor], None],
    clip: Callable[[Any, Any], None],
) -> Callable[[Batch], Tensor]:
    """Return a training step, for `Peer`, with a tool's backward pass and clipping.

    prepared: the tool's network and optimizer; of a GAN the generator's, then the discriminator's.
    """
    if task.kind == "gan":
        return _gan_step(task, prepared, backward, clip)
    problem, [(model, optimizer)] = Problem(task), prepared

    def train(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(model, batch)
        backward(loss)
        if task.clip_norm is not None:
            clip(model, optimizer)
        optimizer.step()
        return problem.reported(loss)

    return train


def _gan_step(task: PeerTask, prepared, backward, clip) -> Callable[[Batch], Tensor]:
    adversaries = Adversaries(task)
    (generator, optimizer_g), (discriminator, optimizer_d) = prepared

    def train(batch: Batch) -> Tensor:
        images, _ = batch
        optimizer_d.zero_grad()
        loss_real = adversaries.against(discriminator(images), 1.0)
        backward(loss_real)
        fake = generator(adversaries.codes(images))
        loss_fake = adversaries.against(discriminator(fake.detach()), 0.0)
        backward(loss_fake)
        if task.clip_norm is not None:
            clip(discriminator, optimizer_d)
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = adversaries.against(discriminator(fake), 1.0)
        backward(loss_g)
        if task.clip_norm is not None:
            clip(generator, optimizer_g)
        optimizer_g.step()
        return (loss_real + loss_fake).detach() + loss_g.detach()

    return train
