"""The Trainer of Hugging Face transformers in a precision mode.

    trainer = MprunTrainer(model=model, args=args, train_dataset=data, precision="amp")

`PrecisionPart` adds the same to others: `class Mine(PrecisionPart, Seq2SeqTrainer): ...`, those of
trl included.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mprun.errors import needing
from mprun.extensions.adapters.recording import RunCallback
from mprun.precision import LossScale, PrecisionPolicy
from mprun.prepared import prepare, state_of

with needing("transformers"):
    from transformers import Trainer, TrainerCallback

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class PrecisionPart(_Base):
    """A Trainer that prepares the model when the optimizer is created.

    With it a reference (`ref_model`, of trl's trainers) is prepared, and put into eval mode. In
    training steps it computes in the mode, as the model does beside which it is set.

    Args:
        args, kwargs: as in the Trainer.
        precision: name of a mode, as in `mprun.prepare`, or a policy.
        scaler: name of a loss scaler or a loss scale; None: the mode's default.
        overrides: glob pattern over module names -> dtype.

    Raises:
        ValueError: a training argument chooses a precision itself, compiles the model or spreads
            it over devices without DDP.
    """

    optimizer: Any

    def __init__(
        self,
        *args: Any,
        precision: str | PrecisionPolicy = "fp16_master_scaled",
        scaler: str | LossScale | None = None,
        overrides: Mapping[str, str] | None = None,
        **kwargs: Any,
    ):
        self._prepare = partial(prepare, precision=precision, scaler=scaler, overrides=overrides)
        self._prepared: Any = None
        super().__init__(*args, **kwargs)
        self.add_callback(_Skips())

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator like the Trainer; refuse ways to spread the model except DDP."""
        for name in _REFUSED:
            if getattr(self.args, name, None):
                raise ValueError(
                    f"{type(self.args).__name__}({name}=True): must be unset ({name}=False), "
                    f"because precision= sets the dtypes"
                )
        super().create_accelerator_and_postprocess()
        kind, mixed = self.accelerator.distributed_type, self.accelerator.mixed_precision
        name = getattr(kind, "value", kind)
        if name not in _DISTRIBUTED or self.args.n_gpu > 1:
            raise ValueError(
                f"{name}, {self.args.n_gpu} GPUs in one process: must be one device, or DDP "
                "(one process for each device, by torchrun)"
            )
        if mixed != "no":
            raise ValueError(
                f"ACCELERATE_MIXED_PRECISION={mixed}: must be no, because precision= "
                f"sets the dtypes"
            )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer like the Trainer, on a prepared model.

        Raises:
            ValueError: `mprun.prepare` refuses the model or the optimizer.
        """
        if self._prepared is not self.model:  # DDP wraps it later
            self._prepare([self.model, *self._references()], self.optimizer)
            self._prepared = self.model
            for reference in self._references():
                reference.eval()
        super().create_optimizer(*args, **kwargs)
        state_of(self.optimizer)  # from now on its state has the loss scale
        return self.optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train a step like the Trainer, and record the loss."""
        with ExitStack() as stack:
            for reference in self._references():
                stack.enter_context(reference.forward.shared.evaluating_in_mode())
            loss = super().training_step(*args, **kwargs)
        for callback in self._recorders():
            callback.add(loss)
        return loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train like the Trainer; evaluate and close a recorded run at the end."""
        try:
            output = super().train(*args, **kwargs)
            if self.eval_dataset is not None and any(r.unevaluated for r in self._recorders()):
                self.evaluate()
        except BaseException as error:
            for recorder in self._recorders():
                recorder.end(error)
            raise
        for recorder in self._recorders():
            recorder.end()
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log like the Trainer; add the loss scale to training losses."""
        if "loss" in logs and (scale := state_of(self.optimizer).scale).kind != "none":
            logs["loss_scale"] = float(scale.scale)
        super().log(logs, *args, **kwargs)

    def _references(self) -> list[Any]:
        reference = getattr(self, "ref_model", None)
        return [] if reference is None else [reference]

    def _recorders(self) -> list[MprunRun]:
        return [c for c in self.callback_handler.callbacks if isinstance(c, MprunRun)]


class MprunTrainer(PrecisionPart, Trainer):
    __doc__ = PrecisionPart.__doc__


class MprunRun(RunCallback, TrainerCallback):
    """A callback of an `MprunTrainer` that turns training into a run directory for `mprun compare`.

    Args:
        folder: as in `mprun.Run`.
        metric: the metric of `evaluate` on which the verdict rests.
        config: further settings that affect the result, beside the training arguments: model, data.
        seed: seed of this run; None: that of the training arguments.
        settings: other settings of `mprun.Run`, for instance `data`, `margin`, `probe_every`.
    """

    def __init__(self, folder: str | Path, metric: str = "eval_loss", **settings: Any):
        super().__init__(folder, metric, **settings)

    @property
    def unevaluated(self) -> bool:
        """True if steps were taken since the last evaluation."""
        return self.open and self.evaluated != self.steps

    def add(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch, divided by the number of micro-batches."""
        self._sum = self._sum + loss

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the run.

        Raises:
            ValueError: the Trainer is no `MprunTrainer`.
        """
        try:
            optimizer = state_of(kwargs["optimizer"]).optimizer
        except ValueError:
            raise ValueError("MprunRun: needs an MprunTrainer (or PrecisionPart)") from None
        used = {name: getattr(args, name) for name in _SETTINGS if hasattr(args, name)}
        self.begin([optimizer], {"args": used}, args.seed if self.seed is None else self.seed)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step; a divergence stops the training."""
        loss, self._sum = self._sum, 0.0
        if self.open and not self.record(loss):
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the evaluation.

        Raises:
            ValueError: the evaluation lacks the metric.
        """
        if self.open and not self.record_metric(kwargs["metrics"], "evaluated"):
            control.should_training_stop = True


class _Skips(TrainerCallback):
    """A callback that tells the Trainer about skipped updates: then no schedule advances."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        outer = kwargs["optimizer"]
        last = state_of(outer).last
        if last is not None and last.found_inf is not None:
            outer._is_overflow = bool(last.found_inf)


# Training arguments that affect the result.
_SETTINGS = (
    *("max_steps", "num_train_epochs", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "max_grad_norm", "learning_rate", "weight_decay"),
    *("lr_scheduler_type", "warmup_steps", "warmup_ratio", "optim", "label_smoothing_factor"),
)
_DISTRIBUTED = ("NO", "MULTI_GPU", "MULTI_CPU")  # the two are DDP
_REFUSED = ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval", "tf32", "torch_compile")
