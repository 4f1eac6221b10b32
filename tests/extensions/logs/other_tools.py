"""Logs that other tools' own libraries write, each installed or not, and faults planted in them.

Trainers train, on a loss that is the wanted value whatever the weights are. Logs of Keras, Hugging
Face and TensorBoard are damaged, or get a second attempt, as it happens to users.
"""

import contextlib
import gzip
import importlib.util
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from mprun.errors import MprunError
from mprun.extensions.logs.log_formats import read_logs

Values = Sequence[float]
STEPS = 20


def curve(shift: float, seed: int) -> list[float]:
    """Return a falling loss, float64 [STEPS], with noise of 0.05 %."""
    noise = np.random.default_rng([int(1e4 * shift), seed]).standard_normal(STEPS)
    values = (2 + 1 / np.arange(1, STEPS + 1)) * (1 + shift) * (1 + 0.0005 * noise)
    return [float(value) for value in values]


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


def lightning(folder: Path, values: Values, logger: str) -> None:
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


def lightning_csv(folder: Path, values: Values) -> Path:
    lightning(folder, values, "csv")
    return folder / "metrics.csv"


def lightning_events(folder: Path, values: Values) -> Path:
    lightning(folder, values, "events")
    return folder


def hugging_face(folder: Path, values: Values) -> str:
    """Train with the Trainer, save its state; return what it prints."""
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
    return printed.getvalue()


def hugging_face_state(folder: Path, values: Values) -> Path:
    hugging_face(folder, values)
    return folder / "trainer_state.json"


def hugging_face_printed(folder: Path, values: Values) -> Path:
    path = folder / "train.log"
    path.write_text(hugging_face(folder, values), encoding="utf-8")
    return path


def keras_csv(folder: Path, values: Values, append: bool = False) -> Path:
    import keras

    path = folder / "training.csv"
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss=lambda wanted, got: wanted + 0 * got, optimizer="sgd")
    # An epoch has one batch, whose target is the value.
    batches = ((np.ones((1, 1)), np.full((1, 1), value)) for value in values)
    logger = keras.callbacks.CSVLogger(str(path), append=append)
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
    "lightning": Tool("lightning", lightning_csv, "train_loss"),
    "lightning_events": Tool("lightning", lightning_events, "train_loss"),
    "transformers": Tool("transformers", hugging_face_state),
    "transformers_printed": Tool("transformers", hugging_face_printed, error=5e-4),
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


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep libraries from the network and their words from the terminal."""
    given = {
        "KERAS_BACKEND": "torch", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1",
        "MLFLOW_ALLOW_FILE_STORE": "true", "TQDM_DISABLE": "1", "YOLO_OFFLINE": "true",
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def written(name: str, folder: Path, values: Values) -> Path:
    """Return the path of a run that a tool's library logs into a new folder."""
    folder.mkdir(parents=True)
    with quietly():
        return TOOLS[name].write(folder, values)


class Case(NamedTuple):
    """A log with a fault: what was done to it, and what the refusal or the note must say."""

    tool: str
    what: str
    change: Callable[[Path], Path]  # of a log of the values 2 + 1 / step
    said: str
    refused: bool = True


def edited(change: Callable[[str], str], name: str = "") -> Callable[[Path], Path]:
    """Return a change of a file's text."""

    def made(path: Path) -> Path:
        new = path.with_name(name) if name else path
        new.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
        return new

    return made


def appended(path: Path) -> Path:
    """Let Keras' own CSVLogger append a second attempt."""
    with quietly():
        return keras_csv(path.parent, curve(0.1, 9), append=True)


def second_writer(path: Path) -> Path:
    return torch_events(path, curve(0.1, 9))


def cut(path: Path) -> Path:
    [file] = [file for file in path.iterdir() if "tfevents" in file.name]
    file.write_bytes(file.read_bytes()[:-20])
    return path


def resumed(path: Path) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(path)) as writer:
        for step in range(15, 25):
            writer.add_scalar("train/loss", 1.5 + 1 / step, step)
    return path


def twice_named(text: str) -> str:
    return "".join(f"{line},{line.split(',')[1]}\n" for line in text.splitlines())


def blank_end(text: str) -> str:
    lines = text.splitlines()
    return "\n".join([*lines[:-4], *(re.sub(",.*", ",", line) for line in lines[-4:])]) + "\n"


def gzipped(path: Path) -> Path:
    new = path.with_name(path.name + ".gz")
    new.write_bytes(gzip.compress(path.read_bytes())[:-12])
    return new


CASES = (
    Case("keras", "a second attempt appended (append=True)", appended, "line 22: begins again"),
    Case("keras", "two columns of one name", edited(twice_named), "line 1: 2 columns are called"),
    Case("keras", "no values in the last four rows", edited(blank_end), "line 18: from here to"),
    Case("keras", "cut in the last number", edited(lambda text: text[:-6]),
         "line 21 does not end", refused=False),
    Case("keras", "a gzip archive that is cut", gzipped, "not a complete gzip archive"),
    Case("keras", "decimal and delimiting commas", edited(lambda text: text.replace(".", ",")),
         "cells, the header has"),
    Case("transformers_printed", "cut in the last dictionary",
         edited(lambda text: text.rpartition("{'train_runtime")[0].rstrip()[:-9]),
         "line 20 does not end", refused=False),
    Case("tensorboard", "a second attempt in the folder", second_writer, "21: begins again"),
    Case("tensorboard", "resumed at step 15 of 20", resumed, "goes back to step 15 after 20",
         refused=False),
    Case("tensorboard", "cut in the last record", cut, "ends within a record", refused=False),
)  # fmt: skip


def told(case: Case, folder: Path) -> tuple[bool, str]:
    """Return whether a faulty log is refused, and the refusal or the notes."""
    path = written(case.tool, folder, [2 + 1 / step for step in range(1, STEPS + 1)])
    try:
        [log] = read_logs(case.change(path), TOOLS[case.tool].scalar)
    except MprunError as error:
        return True, str(error)
    return False, "; ".join(log.notes)
