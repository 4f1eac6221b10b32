"""Lightning trains in two processes that it starts itself: `python spawned.py STRATEGY FOLDER`."""

import sys
from pathlib import Path

import lightning as L
import torch
from torch.nn import functional as F

from mprun.prepared import state_of

from .trainer_ranks import CLIP, Classifier, halves, lightning_trainer, sgd

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
        found = {"state": self.model.state_dict(), "scale": scale}
        found["steps"] = self.trainer.global_step
        torch.save(found, self.folder / f"{self.global_rank}.pt")


def main(strategy: str, folder: Path) -> None:
    trainer = lightning_trainer(MODE, folder, 0, strategy=strategy, gradient_clip_val=CLIP)
    trainer.fit(Module(folder))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
