"""Logs that other tools' own libraries write, each installed or not.

Trainers train, on a loss that is the wanted value whatever the weights are.
"""

import contextlib
import importlib.util
import io
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

Values = Sequence[float]
STEPS = 20


def curve() -> list[float]:
    """Return a falling loss, float64 [STEPS], with noise of 0.05 %."""
    noise = np.random.default_rng(0).standard_normal(STEPS)
    return ((2 + 1 / np.arange(1, STEPS + 1)) * (1 + 0.0005 * noise)).tolist()


class Tool(NamedTuple):
    """A library that logs a run's values into a folder; `write` returns the run's path."""

    module: str  # what it imports
    write: Callable[[Path, Values], Path]
    scalar: str = "loss"
    error: float = 2.0**-24  # of a value as it is written, relative; FP32's by default


class Valued(torch.nn.Module):
    """A network whose loss is the value of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, value: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
        return {"loss": value.mean() + 0 * self.weight.sum()}


def torch_events(folder: Path, values: Values) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step, value in enumerate(values, start=1):
            writer.add_scalar("train/loss", value, step)
    return folder


def lightning(folder: Path, values: Values, logger: str) -> Path:
    from lightning import pytorch as lightning
    from lightning.pytorch import loggers

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Valued()

        def training_step(self, batch, number: int) -> torch.Tensor:
            loss = self.network(batch[0])["loss"]
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, number: int) -> None:
            self.log("val_loss", self.network(batch[0])["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.TensorDataset(torch.tensor(values, dtype=torch.float64))
    loader = torch.utils.data.DataLoader(data, batch_size=1)
    kinds = {"csv": loggers.CSVLogger, "events": loggers.TensorBoardLogger}
    trainer = lightning.Trainer(
        max_epochs=1, log_every_n_steps=1, accelerator="cpu", enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
        logger=kinds[logger](str(folder), name="", version=""),
    )  # fmt: skip
    trainer.fit(Module().double(), loader, loader)
    return folder / "metrics.csv" if logger == "csv" else folder


def hugging_face(folder: Path, values: Values, name: str) -> Path:
    """Train with the Trainer; name: of its state, or of a file of what it prints."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=1, num_train_epochs=1, logging_steps=1,
        report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=True,
    )  # fmt: skip
    data = [{"value": torch.tensor(value, dtype=torch.float64)} for value in values]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer = Trainer(Valued().double(), arguments, train_dataset=data)
        trainer._get_train_sampler = lambda *_: None  # in the order of the data
        trainer.train()
    trainer.save_state()
    (folder / "train.log").write_text(printed.getvalue(), encoding="utf-8")
    return folder / name


def keras_csv(folder: Path, values: Values) -> Path:
    import keras

    path = folder / "training.csv"
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss=lambda wanted, got: wanted + 0 * got, optimizer="sgd")
    # An epoch has one batch, whose target is the value.
    batches = ((np.ones((1, 1)), np.full((1, 1), value)) for value in values)
    logger = keras.callbacks.CSVLogger(str(path))
    model.fit(
        batches, steps_per_epoch=1, epochs=len(values), callbacks=[logger], verbose=0, shuffle=False
    )
    return path


def mlflow_files(folder: Path, values: Values) -> Path:
    import mlflow

    mlflow.set_tracking_uri((folder / "mlruns").resolve().as_uri())
    mlflow.set_experiment("training")
    with mlflow.start_run() as run:
        for step, value in enumerate(values, start=1):
            mlflow.log_metric("loss", value, step=step)
    return folder / "mlruns" / run.info.experiment_id / run.info.run_id


def wandb_offline(folder: Path, values: Values) -> Path:
    import wandb

    settings = wandb.Settings(mode="offline", silent=True)
    with wandb.init(project="mprun", dir=str(folder), settings=settings) as run:
        for value in values:
            run.log({"loss": value, "lr": 0.1})
    wandb.teardown()  # ends the process that writes the file
    return folder / "wandb"


def ultralytics_csv(folder: Path, values: Values) -> Path:
    from ultralytics.engine.trainer import BaseTrainer

    trainer = SimpleNamespace(csv=folder / "results.csv", train_time_start=0.0, epoch=0)
    for trainer.epoch, value in enumerate(values):
        metrics = {"train/box_loss": value, "metrics/mAP50(B)": 0.5, "lr/pg0": 0.01}
        BaseTrainer.save_metrics(trainer, metrics)
    return trainer.csv


def timm_csv(folder: Path, values: Values) -> Path:
    from timm.utils import update_summary

    path = folder / "summary.csv"
    for epoch, value in enumerate(values):
        update_summary(epoch, {"loss": value}, {"top1": 70.0}, path, write_header=epoch == 0)
    return path


def pandas_csv(folder: Path, values: Values) -> Path:
    import pandas

    path = folder / "metrics.csv.gz"
    steps = range(1, len(values) + 1)
    table = pandas.DataFrame({"step": steps, "loss": values, "lr": 0.1})
    table.to_csv(path, sep=";", decimal=",", index=False)
    return path


TOOLS = {
    "tensorboard": Tool("tensorboard", torch_events, "train/loss"),
    "lightning": Tool("lightning", partial(lightning, logger="csv"), "train_loss"),
    "lightning_events": Tool("lightning", partial(lightning, logger="events"), "train_loss"),
    "transformers": Tool("transformers", partial(hugging_face, name="trainer_state.json")),
    "transformers_printed": Tool(
        "transformers", partial(hugging_face, name="train.log"), error=5e-4
    ),
    "keras": Tool("keras", keras_csv),
    "mlflow": Tool("mlflow", mlflow_files),
    "wandb": Tool("wandb", wandb_offline),
    "ultralytics": Tool("ultralytics", ultralytics_csv, "train/box_loss", error=5e-6),
    "timm": Tool("timm", timm_csv, "train_loss"),
    "pandas": Tool("pandas", pandas_csv),
}


def missing(name: str) -> str:
    """Return why a tool's logs cannot be written here; "" if they can."""
    module = TOOLS[name].module
    return "" if importlib.util.find_spec(module) else f"{module} is not installed"


def written(name: str, folder: Path, values: Values) -> Path:
    """Return the path of a run that a tool's library logs into a new folder."""
    folder.mkdir(parents=True)
    quiet = {
        "KERAS_BACKEND": "torch", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1",
        "MLFLOW_ALLOW_FILE_STORE": "true", "TQDM_DISABLE": "1", "YOLO_OFFLINE": "true",
    }  # fmt: skip
    with mock.patch.dict(os.environ, quiet), contextlib.redirect_stderr(io.StringIO()):
        return TOOLS[name].write(folder, values)
