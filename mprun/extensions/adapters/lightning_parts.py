"""Lightning's precision plugin and callback, for both names of the library.

Lightning calls `training_step` of its module, which is no call of the module itself. Modules that
the step calls (`self(x)`, `self.net(x)`) run in the precision mode. Everything between two calls,
the loss for instance, is computed in FP32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import LBFGS

from mprun.extensions.adapters.recording import RunCallback
from mprun.precision import LossScale, PrecisionPolicy
from mprun.prepared import prepare, state_of


class PrecisionPart:
    """A precision plugin that prepares a module for training.

    Args:
        precision: name of a mode, as in `mprun.prepare`, or a policy.
        scaler: name of a loss scaler or a loss scale; None: the mode's default.
        overrides: glob pattern over names of the module's modules -> dtype.
    """

    def __init__(
        self,
        precision: str | PrecisionPolicy = "fp16_master_scaled",
        scaler: str | LossScale | None = None,
        overrides: Mapping[str, str] | None = None,
    ):
        super().__init__()
        self._prepare = partial(prepare, precision=precision, scaler=scaler, overrides=overrides)
        self._prepared: Any = None

    def convert_module(self, module: Any) -> Any:
        """Prepare the module for training, before a strategy wraps it; the rest stays in FP32.

        Raises:
            ValueError: the strategy is neither for one device nor DDP, or `mprun.prepare` refuses
                the module.
        """
        trainer = module.trainer
        if trainer.state.fn != "fit" or module is self._prepared:
            return module
        strategy = trainer.strategy
        if not _STRATEGIES & {kind.__name__ for kind in type(strategy).__mro__}:
            raise ValueError(
                f"strategy: is a {type(strategy).__name__}; must be for one device, or DDP"
            )
        module.to(strategy.root_device)
        self._prepared = self._prepare(module)
        return module

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Let the optimizers share the loss scale, and put it into their states, from the start."""
        for optimizer in optimizers:
            with suppress(ValueError):  # its part of the module is not prepared
                state_of(optimizer)
        return model, optimizers, lr_schedulers

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        """Run forward and backward, clip, then update; a skipped update recomputes nothing."""
        if isinstance(optimizer, LBFGS):
            return super().optimizer_step(optimizer, model, closure, **kwargs)  # type: ignore[misc]
        result = closure()
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        if result is not None or not model.automatic_optimization:
            optimizer.step(**kwargs)
        return result


class RunPart(RunCallback):
    """A callback that turns every fit into a run directory for `mprun compare`.

    Args:
        folder: as in `mprun.Run`.
        metric: name under which the module logs the metric of the verdict in validation.
        config: further settings that affect the result, beside the hyperparameters of the module
            and the trainer's settings.
        seed: seed of this run; None: that of `seed_everything`.
        loss: name under which the module logs its training loss; None: `training_step` returns it.
            Needed if manual optimization returns nothing. Of its micro-batches the mean counts.
        settings: other settings of `mprun.Run`, for instance `data`, `margin`, `probe_every`.
    """

    def __init__(
        self,
        folder: str | Path,
        metric: str = "val_loss",
        *,
        loss: str | None = None,
        **settings: Any,
    ):
        super().__init__(folder, metric, **settings)
        self.loss = loss

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the run.

        Raises:
            ValueError: the trainer has no `MprunPrecision`, or there is no seed.
        """
        if not isinstance(trainer.precision_plugin, PrecisionPart):
            raise ValueError("MprunRun: needs MprunPrecision(...) in plugins= of the Trainer")
        config = {
            "hparams": dict(getattr(pl_module, "hparams", {})),
            "trainer": {name: getattr(trainer, name) for name in _SETTINGS},
        }
        seed = os.environ.get("PL_GLOBAL_SEED") if self.seed is None else self.seed
        if seed is None:
            raise ValueError("seed=None: pass seed=, or call seed_everything(...) before the fit")
        self.begin(trainer.optimizers, config, int(seed))
        self._taken, self._batches = _taken(trainer), 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step after its last micro-batch."""
        if not self.open:
            return
        self._sum = self._sum + self._loss_of(trainer, outputs)
        self._batches += 1
        taken = _taken(trainer)
        if taken == self._taken:
            return
        # Lightning has divided the losses of automatic optimization, and knows no others.
        parts = 1 if pl_module.automatic_optimization else self._batches
        self._taken, loss, self._sum, self._batches = taken, self._sum / parts, 0.0, 0
        if not self.record(loss):
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the metrics that were logged in validation."""
        if not self.open or trainer.sanity_checking:
            return
        if not self.record_metric(trainer.callback_metrics, "logged in validation"):
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the run."""
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the run as failed, or as preempted by an interrupt."""
        self.end(exception)

    def _loss_of(self, trainer: Any, outputs: Any) -> Tensor | float:
        if self.loss is None:
            found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        elif (found := trainer.callback_metrics.get(self.loss)) is not None:
            found = found / trainer.accumulate_grad_batches
        if found is None:
            where = "training_step returned no loss" if self.loss is None else "not logged"
            raise ValueError(f"loss={self.loss!r}: {where}; name the logged value that is the loss")
        return found.detach() if isinstance(found, Tensor) else found


_STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}  # and what derives from them
# The trainer's settings that affect the result.
_SETTINGS = (
    *("max_steps", "max_epochs", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm"),
)


def _taken(trainer: Any) -> list[int]:
    return [state_of(optimizer).steps for optimizer in trainer.optimizers]
