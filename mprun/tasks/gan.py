"""DCGAN: a discriminator step on real and generated images, then a generator step."""

from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.config.components import TASKS
from mprun.data.source import Batch, Source
from mprun.precision import ForwardContext
from mprun.tasks.learner import Learner
from mprun.tasks.sample_distance import SampleDistance
from mprun.tasks.task import Task, as_row, shared

# The same codes at every evaluation and in every run, so that samples can be compared.
GRID_SEED, SAMPLE_SEED = 2018, 2019


class GAN(Task):
    """Binary cross-entropy on logits; metrics d_loss, g_loss and loss, their sum.

    Radford et al., arXiv 1511.06434, in the order of the PyTorch example: D on real, D on fake,
    update D; G against the updated D, update G. With several micro-batches D takes all of them
    before its update, and G after it. G then generates the same images again instead of keeping the
    graphs of all. The loss works on logits in every mode, because the gradient of a sigmoid
    followed by BCE does not fit FP16.

    With two scales a loss has that of the network that it updates, also where G's goes through D.
    Each optimizer skips its update by itself. `found_inf` says that at least one did; the schedule
    of both then stands still, so that they keep the same learning rate.

    Args:
        generator, discriminator: their models may share a loss scale.
        sample_distance: adds the metric sliced_wasserstein to an evaluation; None saves its time.
    """

    metrics = TASKS["gan"].metrics

    def __init__(
        self,
        generator: Learner,
        discriminator: Learner,
        data: Source,
        forward_context: ForwardContext,
        *,
        latent_size: int,
        sample_distance: SampleDistance | None = None,
        **common: Any,
    ):
        super().__init__(data, forward_context.policy, forward_context, **common)
        self.g, self.d = generator, discriminator
        self.latent_size, self.sample_distance = latent_size, sample_distance
        self.learners = {"generator": generator, "discriminator": discriminator}
        of_d, of_g = (own.prepared.loss_scale for own in (discriminator, generator))
        self.loss_scales = {"loss_scale": of_d}
        if of_g is not of_d:
            self.loss_scales["loss_scale_generator"] = of_g
        self.device = forward_context.device
        codes = torch.randn(64, latent_size, generator=torch.Generator().manual_seed(GRID_SEED))
        self.fixed_codes = codes.to(self.device)

    def twin(self, learners: Mapping[str, Any], forward_context: ForwardContext) -> Self:
        twin = super().twin(learners, forward_context)
        twin.g, twin.d = learners["generator"], learners["discriminator"]
        return twin

    def compute(self, batches: Iterable[Batch], measure: bool = False) -> dict[str, Tensor]:
        """Update D, then G."""
        self.g.zero_grad()
        self.d.zero_grad()
        sizes, d_losses, g_losses = [], [], []
        fake = None
        for real, _ in self.each_part(batches):
            sizes.append(len(real))
            with self.watched():
                with torch.set_grad_enabled(not self.in_parts):
                    fake = self._made(len(real))
                d_losses.append(self._propagate_d(real, fake.detach()))
        if self.g.statistics is not None:
            self.g.statistics.parts.clear()  # the second pass of G counts
        self.mean_statistics(self.d)
        d_update = self.d.step(measure)

        # D's weight gradients are not needed here; its BatchNorm statistics move once more.
        self.d.model.requires_grad_(False)
        self.d.prepared.guard_step()
        for size in self.each_part(sizes):
            with self.watched():
                if self.in_parts or fake is None:
                    fake = self._made(size)
                loss_g = self.g.outside(self._bce(self.d.inside(fake, part_of=self.g), 1.0))
                loss_g.backward()
            self.g.end_part()
            g_losses.append(loss_g.detach())
        self.mean_statistics(self.g, self.d)
        g_update = self.g.step(measure)
        self.d.model.requires_grad_(True)

        d_loss, g_loss = self.mean_over_parts(d_losses), self.mean_over_parts(g_losses)
        metrics = {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss}
        metrics |= d_update.metrics("d_") | g_update.metrics("g_")
        metrics["loss_scale"] = metrics["d_loss_scale"]
        if d_update.found_inf is not None and g_update.found_inf is not None:
            metrics["found_inf"] = torch.maximum(d_update.found_inf, g_update.found_inf)
        return metrics

    def _made(self, count: int) -> Tensor:
        """Generate images `[count, channels, size, size]` from new codes."""
        codes = torch.randn(count, self.latent_size, device=self.device)
        return self.g.inside(codes)

    def _propagate_d(self, real: Tensor, fake: Tensor) -> Tensor:
        """Add the gradients of D's two losses; return the sum of the losses, 0-dim."""
        loss_real = self.d.outside(self._bce(self.d.inside(real), 1.0))
        loss_real.backward()
        self.d.end_part()
        loss_fake = self.d.outside(self._bce(self.d.inside(fake), 0.0))
        loss_fake.backward()
        self.d.end_part()
        return (loss_real + loss_fake).detach()

    @shared
    def evaluate(self) -> dict[str, float]:
        """Return losses on the held-out images and as many generated ones (64 codes, repeated).

        sliced_wasserstein is between the held-out images and as many of fixed, distinct codes.
        """
        rows, count = [], 0
        with (
            self.g.evaluating(self.eval_in_mode) as generator,
            self.d.evaluating(self.eval_in_mode) as discriminator,
        ):
            fake = discriminator(generator(self.fixed_codes)).float()
            for images, _ in self.held_out():
                real = discriminator(images).float()
                share = len(images) / len(fake)
                d_sum = F.softplus(-real).sum() + F.softplus(fake).sum() * share
                rows.append(as_row(d_sum, F.softplus(-fake).sum() * share))
                count += len(images)
        d_loss, g_loss = self.ranks.mean(rows, count)
        values = {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss}
        if self.sample_distance is not None:
            values["sliced_wasserstein"] = self._distance_to_held_out(self.sample_distance)
        return values

    def samples(self) -> Tensor:
        """Return 64 images from fixed codes, float32 in [0, 1]; non-finite values are black."""
        with self.g.evaluating(self.eval_in_mode) as generator:
            images = generator(self.fixed_codes).float()
        return images.add(1).div(2).nan_to_num(0).clamp(0, 1)

    def state_dict(self) -> dict:
        return {
            "generator": self.g.state_dict(),
            "discriminator": self.d.state_dict(),
            "loss_scales": {name: s.state_dict() for name, s in self.loss_scales.items()},
        }

    def load_state_dict(self, state: dict) -> None:
        self.g.load_state_dict(state["generator"])
        self.d.load_state_dict(state["discriminator"])
        if state["loss_scales"].keys() != self.loss_scales.keys():
            raise ValueError(
                "saved loss scales must come from a run with the scaler.per of this run"
            )
        for name, scale in self.loss_scales.items():
            scale.load_state_dict(state["loss_scales"][name])

    def _distance_to_held_out(self, distance: SampleDistance) -> float:
        held_out = [images for images, _ in self.data.eval_batches()]  # on each rank
        sizes = [len(images) for images in held_out]
        random = torch.Generator().manual_seed(SAMPLE_SEED)
        codes = torch.randn(sum(sizes), self.latent_size, generator=random).to(self.device)
        with self.g.evaluating(self.eval_in_mode) as generator:
            generated = [generator(part).float() for part in codes.split(sizes)]
        return distance(held_out, generated)

    def _bce(self, logits: Tensor, target: float) -> Tensor:
        logits = logits.to(self.policy.loss_dtype)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))
