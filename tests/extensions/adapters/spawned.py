"""Lightning trains in two processes that it starts itself: `python spawned.py STRATEGY FOLDER`."""

import sys
from pathlib import Path

import lightning as L
import torch
from torch.nn import functional as F

from mprun.extensions.adapters.lightning import MprunPrecision, MprunRun
from mprun.prepared import state_of

from .trainer_ranks import CLIP, Classifier, halves, sgd

MODE = "fp16_master_scaled"


class Module(L.LightningModule):
    """Leave what each process ends with."""

    def __init__(self, folder: Path):
        super().__init__()
        self.model, self.folder = Classifier(), folder

    def train_dataloader(self):
        return halves(1, self.global_rank)

    def training_step(self, batch, index):
        return F.cross_entropy(self.model(batch[0])["logits"], batch[1])

    def configure_optimizers(self):
        return sgd(self)

    def on_train_end(self):
        scale = float(state_of(self.trainer.optimizers[0]).scale.scale)
        found = {
            "state": self.model.state_dict(),
            "scale": scale,
            "steps": self.trainer.global_step,
        }
        torch.save(found, self.folder / f"{self.global_rank}.pt")


def main(strategy: str, folder: Path) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        plugins=[MprunPrecision(MODE)],
        callbacks=[MprunRun(folder / "runs", seed=0, log_every=1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(folder))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
