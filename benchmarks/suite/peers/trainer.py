"""lightning.Trainer, advanced from outside.

It follows Lightning's pages "LightningModule", "Own your loop" (manual optimization of a GAN, which
follows the PyTorch DCGAN tutorial) and "N-Bit Precision". Logger, progress bar, model summary and
checkpoints are off. `Trainer.fit` runs in a separate thread and waits in its data loader. It gets
as many batches as steps were requested; control returns when it requests one more. A window of
several steps costs two changes of thread, none per step. The loss scale is updated after each
optimizer's step, not once per iteration.
"""

import logging
import threading
import time
import warnings
from collections.abc import Iterator

import lightning
import torch
from torch import Tensor

from benchmarks.suite.peers.equipment import plain
from benchmarks.suite.peers.fabric import PRECISION
from benchmarks.suite.peers.peer import SkipCount
from benchmarks.suite.peers.problems import Adversaries, Problem
from benchmarks.suite.peers.task import PeerTask
from mprun.data.source import Batch
from mprun.extensions.bench.measure import Contender

_ENDLESS = 10**9  # batches; Lightning does not read ahead of a loader with a length


def make_trainer(task: PeerTask) -> "TrainerPeer":
    """Trainer with Lightning's precision plugin and GradScaler, NCHW, torch's default optimizer."""
    # It logs the visible GPUs, and that TF32 would be faster.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    # Lightning uses a class that torch has deprecated.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated", category=FutureWarning)
    equipment = plain(task)
    skips = SkipCount(equipment.optimizers) if task.mode == "amp" else None
    kind = _GAN if task.kind == "gan" else _OneModel
    module = kind(task, equipment.optimizers)
    automatic = module.automatic_optimization
    precision = PRECISION[task.mode]
    trainer = lightning.Trainer(
        accelerator="gpu" if task.device.type == "cuda" else "cpu",
        devices=1,
        precision=precision,
        max_epochs=1,
        gradient_clip_val=task.clip_norm if automatic else None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    settings = equipment.settings | {"precision": precision}
    return TrainerPeer(task, settings, trainer, module, skips)


class TrainerPeer(Contender):
    """A contender whose steps are taken by the trainer's thread, as many at a time as `run` says.

    `run` raises the thread's exceptions. The thread ends with `close`, or with the process.
    """

    def __init__(self, task: PeerTask, settings: dict, trainer, module, skips: SkipCount | None):
        self.task, self._settings = task, settings
        self.samples_per_step, self.sample = task.samples_per_step, task.sample
        self.first_use_s: float | None = None
        self._trainer, self._module, self._skips = trainer, module, skips
        self._loader = _HeldLoader(task, skips)
        self._error: BaseException | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._fit, name="lightning.Trainer", daemon=True)

    def settings(self) -> dict:
        return self._settings

    def step(self) -> Tensor:
        """Train on the next batch; return its loss, 0-dim on the device, detached."""
        return self.run(1)

    def run(self, steps: int) -> Tensor:
        """Take `steps` training steps, at least 1; return the last loss."""
        started = time.perf_counter()
        if self._has_ended:
            raise self._error or RuntimeError("lightning.Trainer has ended")
        self._loader.allow(steps)
        if self._thread.ident is None:
            self._thread.start()
        self._loader.wait()
        if self._error is not None:
            raise self._error
        loss = self._module.reported
        if self.first_use_s is None:
            if loss.device.type == "cuda":
                torch.cuda.synchronize(loss.device)
            self.first_use_s = time.perf_counter() - started
        return loss

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors that the optimizers update, by name."""
        return self.task.weights()

    def skipped(self) -> int:
        """Return the steps with a skipped update so far; may wait for the device."""
        return 0 if self._skips is None else self._skips.total()

    def close(self) -> None:
        """End `Trainer.fit` and its thread; there are no steps after it."""
        if self._thread.is_alive():
            self._loader.end()
            self._thread.join()

    def _fit(self) -> None:
        try:
            self._trainer.fit(self._module, train_dataloaders=self._loader)
        except BaseException as error:
            self._error = error
        self._has_ended = True
        self._loader.give_back()


class _HeldLoader:
    """The task's batches, available while steps are allowed; the trainer's thread reads them."""

    def __init__(self, task: PeerTask, skips: SkipCount | None):
        self._task, self._skips = task, skips
        self._next, self._allowed, self._ended = 0, 0, False
        self._may_go, self._is_idle = threading.Semaphore(0), threading.Semaphore(0)

    def allow(self, steps: int) -> None:
        """Let the trainer take `steps` steps; called by the bench, as are `wait` and `end`."""
        self._allowed = steps
        self._may_go.release()

    def wait(self) -> None:
        """Wait until these steps are taken, or the trainer has ended."""
        self._is_idle.acquire()

    def end(self) -> None:
        self._ended = True
        self._may_go.release()

    def give_back(self) -> None:
        """Return control: the trainer wants more steps, or has ended."""
        self._is_idle.release()

    def __len__(self) -> int:
        return _ENDLESS

    def __iter__(self) -> Iterator[Batch]:
        self._may_go.acquire()
        while not self._ended:
            yield self._task.batch(self._next)
            # The next batch is requested: the step on this one is complete.
            self._next += 1
            self._allowed -= 1
            if self._skips is not None:
                self._skips.end_step()
            if self._allowed == 0:
                self.give_back()
                self._may_go.acquire()


class _OneModel(lightning.LightningModule):
    """Automatic optimization: the loss is returned, the trainer does the rest."""

    def __init__(self, task: PeerTask, optimizers: tuple[torch.optim.Optimizer, ...]):
        super().__init__()
        (self.network,), (self._optimizer,) = task.networks, optimizers
        self._problem = Problem(task)
        self.reported: Tensor | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._problem.loss(self.network, batch)
        self.reported = self._problem.reported(loss)
        return loss


class _GAN(lightning.LightningModule):
    """Manual optimization, because there are two optimizers."""

    def __init__(self, task: PeerTask, optimizers: tuple[torch.optim.Optimizer, ...]):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = task.networks
        self._optimizers, self._clip_norm = list(optimizers), task.clip_norm
        self._adversaries = Adversaries(task)
        self.reported: Tensor | None = None

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self._optimizers

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # The gradients are unscaled here, and not yet in training_step.
        if self._clip_norm is not None:
            self.clip_gradients(
                optimizer, gradient_clip_val=self._clip_norm, gradient_clip_algorithm="norm"
            )

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer_g, optimizer_d = self.optimizers()
        images, _ = batch
        against = self._adversaries.against
        fake = self.generator(self._adversaries.codes(images))

        loss_real = against(self.discriminator(images), 1.0)
        loss_fake = against(self.discriminator(fake.detach()), 0.0)
        optimizer_d.zero_grad()
        self.manual_backward(loss_real + loss_fake)
        optimizer_d.step()

        loss_g = against(self.discriminator(fake), 1.0)
        optimizer_g.zero_grad()
        self.manual_backward(loss_g)
        optimizer_g.step()
        self.reported = (loss_real + loss_fake).detach() + loss_g.detach()
