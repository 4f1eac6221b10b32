"""Each of two processes runs this in tests of trainers: `python trainer_ranks.py LIBRARY FOLDER`.
Each takes its half of every batch, in all modes of `CASES`. A case may hold one value, in the
second half of one batch, that a mode with a loss scale skips and that FP32 diverges by.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed import get_rank
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mprun
from mprun.prepared import state_of

STEPS, HALF = 6, 4  # rows of half a batch
PLANTED = 3  # step whose second half holds the value
RATE, CLIP = 0.1, 1.0
# Of Lightning: an epoch on the CPU, of which only `MprunRun` keeps something.
QUIET = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}
QUIET |= {"enable_progress_bar": False, "enable_model_summary": False}
CASES = [(mode, plants) for mode in ("fp32", "fp16_master_scaled", "amp") for plants in (0, 1)]


class Classifier(nn.Module):
    """Nothing in it depends on how rows are spread. Computes its loss itself where it is asked."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5))

    def forward(self, inputs, labels=None):
        logits = self.net(inputs)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def rows(plants):
    torch.manual_seed(1)
    inputs = torch.randn(STEPS * 2 * HALF, 12)
    labels = inputs[:, :5].argmax(1)
    if plants:
        inputs[PLANTED * 2 * HALF + HALF, 0] = 1e30
    return inputs, labels


def halves(plants, rank):
    """Return a rank's half of each batch."""
    parts = [t.view(STEPS, 2, HALF, *t.shape[1:])[:, rank].flatten(0, 1) for t in rows(plants)]
    return DataLoader(TensorDataset(*parts), batch_size=HALF)


def sgd(model):
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.9)


def by_hand(mode, plants):
    """(model, its optimizer, skipped steps) of one process that takes whole batches."""
    model, skipped = Classifier(), 0
    model, optimizer = mprun.prepare(model, sgd(model), mode)
    for batch in DataLoader(TensorDataset(*rows(plants)), batch_size=2 * HALF):
        optimizer.zero_grad()
        model(*batch)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found = state_of(optimizer).last.found_inf
        skipped += 0 if found is None else int(found)
    return model, optimizer, skipped


def lightning_trainer(mode, folder, seed, **settings):
    """Two processes, each of which takes its own half."""
    import lightning as L

    from mprun.extensions.adapters.lightning import MprunPrecision, MprunRun

    settings |= QUIET | {"devices": 2, "use_distributed_sampler": False}
    run = MprunRun(folder / "runs", seed=seed, log_every=1)
    return L.Trainer(plugins=[MprunPrecision(mode)], callbacks=[run], **settings)


def of_lightning(mode, plants, folder, manual=False):
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Classifier()
            self.automatic_optimization = not manual

        def training_step(self, batch, index):
            loss = F.cross_entropy(self.model(batch[0])["logits"], batch[1])
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, CLIP)
                optimizer.step()
            return loss

        def configure_optimizers(self):
            return sgd(self)

    module, settings = Module(), {"gradient_clip_val": None if manual else CLIP}
    trainer = lightning_trainer(mode, folder, plants, strategy="ddp", **settings)
    trainer.fit(module, halves(plants, trainer.global_rank))
    return module.model, trainer.optimizers[0], trainer.global_step


def of_lightning_by_hand(mode, plants, folder):
    return of_lightning(mode, plants, folder, manual=True)


def of_transformers(mode, plants, folder):
    import transformers

    from mprun.extensions.adapters.transformers import MprunRun, MprunTrainer

    model = Classifier()
    optimizer = sgd(model)
    args = transformers.TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=HALF,
        max_steps=STEPS,
        max_grad_norm=CLIP,
        use_cpu=True,
        ddp_backend="gloo",
        train_sampling_strategy="sequential",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        seed=plants,
    )
    trainer = MprunTrainer(
        model,
        args,
        train_dataset=[
            {"inputs": one, "labels": label} for one, label in zip(*rows(plants), strict=True)
        ],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        precision=mode,
        callbacks=[MprunRun(folder / "runs", log_every=1)],
    )
    trainer.train()
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    return model, optimizer, trainer.state.global_step


def of_accelerate(mode, plants, folder):
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="no", cpu=True, gradient_accumulation_steps=2)
    model = mprun.prepare(Classifier(), precision=mode)
    model, optimizer = accelerator.prepare(model, sgd(model))
    for inputs, labels in halves(plants, accelerator.process_index):
        for part in range(2):  # two micro-batches, whose losses it divides
            with accelerator.accumulate(model):
                own = slice(part * HALF // 2, (part + 1) * HALF // 2)
                loss = F.cross_entropy(model(inputs[own])["logits"], labels[own])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    optimizer = optimizer.optimizer
    return accelerator.unwrap_model(model), optimizer, state_of(optimizer).steps


def main(library, folder):
    several = (of_lightning, of_lightning_by_hand, of_transformers, of_accelerate)
    train = {f.__name__[3:]: f for f in several}[library]
    found = {}
    for case in CASES:
        model, optimizer, steps = train(*case, folder)
        scale = state_of(optimizer).scale.scale
        found[case] = {"state": model.state_dict(), "scale": float(scale), "steps": steps}
    torch.save(found, folder / f"{get_rank()}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
