"""What Lightning's precision plugin and callback do, whatever name the library is imported by.

Lightning calls `training_step` of its module, which is no call of the module itself: what the step
calls (`self(x)`, `self.net(x)`) runs in the precision mode, what it computes between two calls, the
loss for instance, in FP32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from mprun.adapters.recording import Recording
from mprun.precision import LossScale, PrecisionPolicy, PreparedOptimizer, prepare
from mprun.training.script_run import Run


class PrecisionPart:
    """Of a precision plugin: the module and its optimizers, once both exist, are prepared.

    Args:
        precision: name of a mode, as of `mprun.prepare`, or a policy.
        scaler: name of a loss scaler or a loss scale; None: the one that the mode comes with.
        overrides: glob pattern over names of the module's modules -> dtype.
    """

    precision: Any = "32-true"  # what Lightning itself does

    def __init__(
        self,
        precision: str | PrecisionPolicy = "fp16_master_scaled",
        scaler: str | LossScale | None = None,
        overrides: Mapping[str, str] | None = None,
    ):
        super().__init__()
        self._mode, self._scaler, self._overrides = precision, scaler, overrides
        self._optimizers: list[PreparedOptimizer] = []
        # Those whose turn is over, until all have had theirs.
        self._stepped: list[PreparedOptimizer] = []

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Prepare what is to be trained; what is only evaluated stays in FP32.

        Raises:
            ValueError: a strategy of several devices, or what `mprun.prepare` refuses.
        """
        # None, or those of a fit that is over.
        if all(isinstance(one, PreparedOptimizer) for one in optimizers):
            return model, optimizers, lr_schedulers
        if not hasattr(model, "training_step"):
            kind = type(model).__name__
            raise ValueError(f"strategy: wraps the module as {kind}; must be of one device")
        if _overrides_backward(model):
            raise ValueError(
                f"{type(model).__name__}.backward: the precision mode propagates the loss itself; "
                "remove it, or train without MprunPrecision"
            )
        with _left_out(model):
            _, self._optimizers = prepare(
                model,
                optimizers,
                self._mode,
                scaler=self._scaler,
                overrides=self._overrides,
            )
        return model, list(self._optimizers), lr_schedulers

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any):
        """Propagate a loss through the prepared optimizer.

        Raises:
            ValueError: an argument of `Tensor.backward` other than `retain_graph`.
        """
        retain_graph = kwargs.pop("retain_graph", None)
        if args or kwargs:
            given = ", ".join([*map(str, args), *kwargs])
            raise ValueError(f"backward: takes the loss and retain_graph; given {given}")
        # In manual optimization Lightning tells none.
        own = self._meant(tensor) if optimizer is None else optimizer
        if own in self._stepped:
            self._stepped.clear()
        own.backward(tensor, retain_graph=retain_graph)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        """Forward and backward, clipping, then the update, or its skip."""
        result = closure()
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        if result is not None or not model.automatic_optimization:
            optimizer.step(**kwargs)
            self._stepped.append(optimizer)
            if len(self._stepped) == len(self._optimizers):
                self._stepped.clear()
        return result

    def _meant(self, loss: Tensor) -> PreparedOptimizer:
        """Which optimizer a loss is for: of those that it reaches the next in turn.

        It decides when a shared loss scale moves; gradients are those of all that it reaches.
        """
        if len(self._optimizers) == 1:
            return self._optimizers[0]
        leaves = _leaves(loss)
        reached = [
            optimizer
            for optimizer in self._optimizers
            if any(
                id(own) in leaves
                for own in (*optimizer.gradients.parameters, *optimizer.gradients.updated)
            )
        ] or self._optimizers
        return next((one for one in reached if one not in self._stepped), reached[0])


class RunPart:
    """Of a callback: every fit becomes a run directory for `mprun compare`.

    Args:
        folder: as of `mprun.Run`.
        metric: name under which the module logs, in validation, what the verdict rests on.
        config: what decides on the result beside the hyperparameters of the module and the
            trainer's settings.
        seed: of this run; None: that of `seed_everything`.
        loss: name under which the module logs its training loss; None: what `training_step`
            returns. Needed where manual optimization returns nothing.
        settings: others of `mprun.Run`, for instance `data`, `margin`, `probe_every`.
    """

    def __init__(
        self,
        folder: str | Path,
        metric: str = "val_loss",
        *,
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        loss: str | None = None,
        **settings: Any,
    ):
        super().__init__()
        self.folder, self.metric, self.loss = folder, metric, loss
        self.config, self.seed, self.settings = dict(config or {}), seed, settings
        self.recording: Recording | None = None
        self._sum: Any = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the run.

        Raises:
            ValueError: the trainer has no `MprunPrecision`, or there is no seed.
        """
        optimizers = list(trainer.optimizers)
        if not all(isinstance(one, PreparedOptimizer) for one in optimizers):
            raise ValueError("MprunRun: needs MprunPrecision(...) in plugins= of the Trainer")
        config = {
            "hparams": dict(getattr(pl_module, "hparams", {})),
            "trainer": {name: getattr(trainer, name) for name in _SETTINGS},
            **self.config,
        }
        self.recording = Recording(
            lambda: Run(
                self.folder,
                optimizers,
                config=config,
                seed=_seed(self.seed),
                metric=self.metric,
                **self.settings,
            )
        )
        self._taken, self._sum = [one.steps for one in optimizers], 0.0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step, once all its micro-batches are through."""
        if self.recording is None or not self.recording.open:
            return
        self._sum = self._sum + self._loss_of(trainer, outputs)
        taken = [one.steps for one in trainer.optimizers]
        if taken == self._taken:
            return
        self._taken, loss, self._sum = taken, self._sum, 0.0
        if not self.recording.step(loss):
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the metrics that were logged in validation."""
        recording = self.recording
        if recording is None or not recording.open or trainer.sanity_checking:
            return
        if self.metric not in trainer.callback_metrics:
            logged = ", ".join(trainer.callback_metrics) or "nothing"
            raise ValueError(f"metric={self.metric!r}: not logged in validation, but {logged}")
        if not recording.evaluate({self.metric: trainer.callback_metrics[self.metric]}):
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the run."""
        if self.recording is not None:
            self.recording.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the run as failed, or as preempted by an interrupt."""
        if self.recording is not None:
            self.recording.end(exception)

    def _loss_of(self, trainer: Any, outputs: Any) -> Tensor | float:
        if self.loss is None:
            # Lightning has divided it by the number of micro-batches already.
            found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        elif (found := trainer.callback_metrics.get(self.loss)) is not None:
            found = found / trainer.accumulate_grad_batches
        if found is None:
            where = "training_step returned no loss" if self.loss is None else "not logged"
            raise ValueError(f"loss={self.loss!r}: {where}; name what it logs as its loss")
        return found.detach() if isinstance(found, Tensor) else found


# What a trainer does to the result.
_SETTINGS = (
    *("max_steps", "max_epochs", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm"),
)


def _seed(given: int | None) -> int:
    known = os.environ.get("PL_GLOBAL_SEED")
    if given is None and known is None:
        raise ValueError("seed=None: call seed_everything(...) before, or give it")
    return int(known or 0) if given is None else given


def _leaves(loss: Tensor) -> set[int]:
    """Ids of the tensors that the backward pass of a loss gives gradients to."""
    found, seen, left = set(), set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (own := getattr(node, "variable", None)) is not None:
            found.add(id(own))
        left += [following for following, _ in node.next_functions]
    return found


def _overrides_backward(model: Any) -> bool:
    """Whether a module has a backward hook of its own."""
    owner = next(kind for kind in type(model).__mro__ if "backward" in vars(kind))
    return owner.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")


@contextmanager
def _left_out(model: nn.Module) -> Iterator[None]:
    """Losses and metrics that `training_step` calls itself are out of the model meanwhile.

    They are its children only to be moved and saved with it; as parts of the mode they would round
    their targets to 16 bits.
    """
    own = {module: dict(module._modules) for module in model.modules()}
    try:
        for module in own:
            for name, child in [*module._modules.items()]:
                if isinstance(child, _Loss) or _is_metric(child):
                    del module._modules[name]
        yield
    finally:
        for module, children in own.items():
            module._modules.clear()
            module._modules.update(children)


def _is_metric(module: Any) -> bool:
    kinds: Sequence[type] = type(module).__mro__
    return any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in kinds)
