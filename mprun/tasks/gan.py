"""DCGAN: a discriminator step on real and generated images, then a generator step."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mprun.data.source import Batch, Source
from mprun.precision import BatchNormGuard, ForwardContext, LossScale, PrecisionPolicy
from mprun.tasks.sample_distance import SampleDistance
from mprun.tasks.supervised import micro_batches
from mprun.tasks.task import Task, TrainState

# The same codes at every evaluation and in every run, so that samples can be compared.
GRID_SEED, SAMPLE_SEED = 2018, 2019


class GAN(Task):
    """Binary cross-entropy on logits; metrics d_loss, g_loss and loss, their sum.

    Radford et al., arXiv 1511.06434, in the order of the PyTorch example: D on real, D on fake,
    update D; G against the updated D, update G. The loss works on logits in every mode, because
    the gradient of a sigmoid followed by BCE does not fit FP16.

    Each optimizer skips on its own flag; `found_inf` says that at least one skipped, and the
    schedule stands still for both then, so that they keep the same learning rate.

    Args:
        loss_scales: for real, fake and generator loss, in this order; the same object may stand in
            several places (one shared scale, one per optimizer, or one per loss). Each is updated
            once per step.
        sample_distance: adds the metric sliced_wasserstein to an evaluation; None saves its time.
    """

    def __init__(
        self,
        generator: TrainState,
        discriminator: TrainState,
        data: Source,
        policy: PrecisionPolicy,
        arithmetic: ForwardContext,
        loss_scales: tuple[LossScale, LossScale, LossScale],
        discriminator_guard: BatchNormGuard,
        *,
        latent_size: int,
        eval_in_mode: bool = False,
        sample_distance: SampleDistance | None = None,
    ):
        self.g, self.d, self.data = generator, discriminator, data
        self.policy, self.arithmetic = policy, arithmetic
        self.discriminator_guard = discriminator_guard
        self.latent_size, self.eval_in_mode = latent_size, eval_in_mode
        self.sample_distance = sample_distance
        self.learners = {"generator": generator, "discriminator": discriminator}
        names = ("loss_scale", "loss_scale_fake", "loss_scale_generator")
        self.loss_scales = {}
        for name, scale in zip(names, loss_scales, strict=True):
            if all(scale is not other for other in self.loss_scales.values()):
                self.loss_scales[name] = scale
        self.samples_per_step = data.samples_per_batch
        self.steps_per_epoch = data.batches_per_epoch
        self.device = arithmetic.device
        codes = torch.randn(64, latent_size, generator=torch.Generator().manual_seed(GRID_SEED))
        self.fixed_codes = codes.to(self.device)

    def train_step(self, step: int, measure: bool = False) -> dict[str, Tensor]:
        return self.compute(self.load(step), measure)

    def load(self, step: int) -> Iterator[Batch]:
        """The one batch of a step."""
        return micro_batches(self.data, step, 1, self.channels_last, self.policy.param_dtype)

    def compute(self, batches: Iterable[Batch], measure: bool = False) -> dict[str, Tensor]:
        """One update of D and one of G, on the one batch."""
        generator, discriminator = self.g.network, self.d.network
        self.g.optimizer.zero_grad()
        self.d.optimizer.zero_grad()
        ((real, _),) = batches
        codes = torch.randn(len(real), self.latent_size, device=self.device)
        codes = self.policy.cast_inputs(codes)

        with self.arithmetic:
            # One autocast block per pass: its weight cache must not outlive an update.
            with self.arithmetic.autocast():
                fake = generator(codes)
            with self.arithmetic.autocast():
                logits_real = discriminator(real)
            loss_real = self._bce(logits_real, 1.0)
            self.d.optimizer.backward(loss_real, 0)
            with self.arithmetic.autocast():
                logits_fake = discriminator(fake.detach())
            loss_fake = self._bce(logits_fake, 0.0)
            self.d.optimizer.backward(loss_fake, 1)
        d_update = self.d.optimizer.step(measure)

        # D's weight gradients are not needed here, its BatchNorm statistics move once more.
        self.d.model.requires_grad_(False)
        self.discriminator_guard.save()
        with self.arithmetic:
            with self.arithmetic.autocast():
                logits = discriminator(fake)
            loss_g = self._bce(logits, 1.0)
            self.g.optimizer.backward(loss_g)
        g_update = self.g.optimizer.step(measure)
        self.d.model.requires_grad_(True)

        for scale in self.loss_scales.values():
            scale.update()
        d_loss, g_loss = (loss_real + loss_fake).detach(), loss_g.detach()
        metrics = {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss}
        metrics |= d_update.metrics("d_") | g_update.metrics("g_")
        metrics["loss_scale"] = metrics["d_loss_scale"]
        if d_update.found_inf is not None and g_update.found_inf is not None:
            metrics["found_inf"] = torch.maximum(d_update.found_inf, g_update.found_inf)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Losses on the held-out images and as many generated ones (64 fixed codes, repeated).

        With `sample_distance` also sliced_wasserstein, between the held-out images and as many
        generated ones from fixed codes that are all different.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        count = 0
        with (
            self.g.evaluating(self.arithmetic, self.eval_in_mode) as generator,
            self.d.evaluating(self.arithmetic, self.eval_in_mode) as discriminator,
        ):
            fake = discriminator(generator(self._eval_inputs(self.fixed_codes))).float()
            for images, _ in self.held_out():
                real = discriminator(self._eval_inputs(images)).float()
                share = len(images) / len(fake)
                totals[0] += F.softplus(-real).sum() + F.softplus(fake).sum() * share
                totals[1] += F.softplus(-fake).sum() * share
                count += len(images)
        d_loss, g_loss = (totals / count).tolist()
        values = {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss}
        if self.sample_distance is not None:
            values["sliced_wasserstein"] = self._distance_to_held_out(self.sample_distance)
        return values

    def samples(self) -> Tensor:
        """64 generated images, float32 [64, channels, size, size] in [0, 1], fixed codes.

        Values that are not finite are black.
        """
        with self.g.evaluating(self.arithmetic, self.eval_in_mode) as generator:
            images = generator(self._eval_inputs(self.fixed_codes)).float()
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
            raise ValueError("loss scale state is of another scaler.per")
        for name, scale in self.loss_scales.items():
            scale.load_state_dict(state["loss_scales"][name])

    def _distance_to_held_out(self, distance: SampleDistance) -> float:
        held_out = [images for images, _ in self.held_out()]
        sizes = [len(images) for images in held_out]
        random = torch.Generator().manual_seed(SAMPLE_SEED)
        codes = torch.randn(sum(sizes), self.latent_size, generator=random).to(self.device)
        with self.g.evaluating(self.arithmetic, self.eval_in_mode) as generator:
            generated = [generator(self._eval_inputs(part)).float() for part in codes.split(sizes)]
        return distance(held_out, generated)

    def _bce(self, logits: Tensor, target: float) -> Tensor:
        logits = logits.to(self.policy.loss_dtype)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))
