"""The small runs that are damaged."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.faults.harness import Campaign, mprun

TINY = [
    "device=cpu",
    "threads=1",
    "model=lstm_lm",
    "model.hidden_size=8",
    "model.embedding_size=8",
    "data=synthetic_tokens",
    "data.vocab_size=16",
    "data.sequence_length=4",
    "data.batch_size=2",
    "data.train_tokens=200",
    "data.eval_tokens=200",
]
# Loss scales from 1e7 on: the first updates are skipped, and the state of the scaler matters.
SCALED = ["precision=fp16_master_scaled", "scaler=dynamic", "scaler.init_scale=1e7"]
EVERY = ["train.checkpoint_every=10", "train.eval_every=10", "numerics=probes", "numerics.every=10"]
STOP, END = 30, 40  # steps


class Subject(NamedTuple):
    """A run that stopped at step `STOP`, and an equal one that went on to `END`."""

    stopped: Path
    reference: Path


def subject(campaign: Campaign) -> Subject:
    """Make both runs."""
    folder = campaign.folder / "subject"
    if not folder.exists():
        folder.mkdir(parents=True)
        for name, steps in (("stopped", STOP), ("reference", END)):
            run = [*TINY, *SCALED, *EVERY, f"train.steps={steps}", f"output_dir={folder / name}"]
            answer = mprun(run, folder)
            if answer.code != 0:
                raise RuntimeError(f"the subject did not train: {answer.output}")
    return Subject(folder / "stopped", folder / "reference")


def diverged(campaign: Campaign) -> Path:
    """Make a run that diverges in its second step: Adam's eps is zero in FP16."""
    folder = campaign.folder / "subject" / "diverged"
    if not folder.exists():
        naive = ["precision=fp16_naive", "optim=adam", "train.steps=6", "numerics=probes"]
        words = [*TINY, *naive, "numerics.every=1", f"output_dir={folder}"]
        answer = mprun(words, campaign.folder)
        if answer.code != 3:
            raise RuntimeError(f"the subject did not diverge: {answer.output}")
    return folder


def baseline(campaign: Campaign) -> Path:
    """Make the FP32 run that the subject is compared with."""
    folder = campaign.folder / "subject" / "baseline"
    if not folder.exists():
        words = [*TINY, "precision=fp32", *EVERY, f"train.steps={STOP}", f"output_dir={folder}"]
        answer = mprun(words, campaign.folder)
        if answer.code != 0:
            raise RuntimeError(f"the baseline did not train: {answer.output}")
    return folder


# Six configurations for kills: name -> overrides.
KILLED = {
    "lstm fp32": [*TINY, "precision=fp32"],
    "lstm fp16_naive": [*TINY, "precision=fp16_naive"],
    "lstm fp16_master_scaled, skips": [*TINY, *SCALED],
    "lstm amp adam, skips": [*TINY, "precision=amp", "optim=adam", *SCALED[1:]],
    "autoencoder bf16_master": [
        "device=cpu",
        "threads=1",
        "model=conv_autoencoder",
        "model.width=4",
        "data.batch_size=8",
        "precision=bf16_master",
    ],
    "dcgan amp": [
        "device=cpu",
        "threads=1",
        "model=dcgan",
        "model.generator_width=4",
        "model.discriminator_width=4",
        "data=synthetic_images",
        "data.value_range=tanh",
        "data.image_size=32",
        "data.batch_size=4",
        "data.eval_size=16",
        "precision=amp",
    ],
}
