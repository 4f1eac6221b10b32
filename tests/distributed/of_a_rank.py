"""Each rank of a test runs every case for some steps, with its state digested after each."""

import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from mprun.assembly import build
from mprun.config.compose import compose_config
from mprun.data import DatasetSource, load_digits
from mprun.distributed.group import RankGroup
from mprun.distributed.rank_info import rank_info_from
from mprun.precision import pin_math_flags
from mprun.recording import environment
from mprun.tasks.supervised import Supervised

from ..numerics.failing_runs import ChangedData

PLANTED = 4  # step whose micro-batch 1 holds an infinite pixel
STEPS = 6  # one more, with the scale that it leaves


class Small(nn.Module):
    """Convolution, BatchNorm, dropout: whatever depends on a micro-batch."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 8, 3, 2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, 2),
            nn.BatchNorm2d(8),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.LazyLinear(classes),
        )
        self.body(torch.zeros(2, channels, 32, 32))

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images)


class Regression(Supervised):
    """A task of one's own, which knows nothing of ranks."""

    def loss(self, batch):
        images, labels = batch
        outputs = self.learner.network(images)[:, 0]
        loss = (outputs.float() - labels.float()).square().mean()
        return loss, loss

    def evaluate(self):
        total, count = 0.0, 0
        with self.learner.evaluating(self.eval_in_mode) as model:
            for images, labels in self.held_out():
                total += float((model(images)[:, 0].float() - labels).square().sum())
                count += len(labels)
        return {"loss": total / count}


def small(data):
    """`model.factory` of the cases."""
    return Small(data.num_classes, 3)


class Windows(nn.Module):
    """A language model of one's own without a state, and with dropout."""

    def __init__(self, words: int, kept: int) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(words, 16), nn.Dropout(0.3)
        self.middle, self.output = nn.Linear(16, 16), nn.Linear(16, words)
        self.kept = kept  # tensors of the state, of which there should be none

    def forward(self, tokens: Tensor, state: tuple) -> tuple[Tensor, tuple]:
        x = self.middle(self.dropout(self.embedding(tokens))).tanh()
        return self.output(x), (x[-1],) * self.kept


def windows(data, kept=0):
    """`model.factory` of a language model's cases."""
    return Windows(data.vocab_size, kept)


class Divided(IterableDataset):
    """A stream of digits, of which each rank would have its own."""

    def __init__(self, first: int, step: int) -> None:
        images, labels = load_digits()
        self.items = list(zip(images[first:240:step], labels[first:240:step].tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self):
        return iter(self.items)


def streamed(batch_size, seed, device, workers=0, divided=False):
    """`data.factory` of a stream that all ranks read whole, or that divides itself."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if divided else (0, 1)
    own = {"batch_size": batch_size, "seed": seed, "device": device, "workers": workers}
    return DatasetSource(Divided(rank, world), Divided(0, 8), num_classes=10, **own)


def flat(data):
    """`model.factory` for them."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.2), nn.Linear(32, 10))


def on_another_gpu(data):
    """`model.factory`: the second rank has a GPU that multiplies codes in blocks."""
    if dist.get_rank() == 1:
        environment.how_multiplied = lambda *given: "codes, by the GPU"
    return flat(data)


def planted(source, place: int) -> ChangedData:
    """A source in which one pixel of one micro-batch is infinite; tokens are left as they are."""

    def change(index, batch):
        if index == place and batch[0].is_floating_point():
            images = batch[0].clone()
            images.view(-1)[0] = torch.inf
            batch = (images, *batch[1:])
        return batch

    return ChangedData(source, change)


def digest(state) -> str:
    """Return a digest of all tensors and numbers of a state, bit for bit."""
    found = hashlib.sha256()
    for leaf in tree_leaves(state):
        if isinstance(leaf, Tensor):
            plain = leaf.detach().contiguous().reshape(-1)
            if plain.is_floating_point():  # a NaN is one, whatever its sign
                plain = plain.masked_fill(plain.isnan(), torch.nan)
            found.update(str(leaf.dtype).encode() + plain.view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()[:16]


def taken(overrides: list[str], ranks, plants: bool) -> dict:
    """Digests of the state after each step, skipped updates, losses, and the last state."""
    config = compose_config([*overrides, "device=cpu", "devices=1"]).config
    pin_math_flags(config.precision.fp32_math)
    torch.manual_seed(config.seed)
    built = build(config, torch.device("cpu"), ranks)
    task = built.task
    if plants:
        task.data = planted(task.data, PLANTED * config.train.accumulate + 1)
    digests, losses = [], []
    for step in range(STEPS):
        metrics = built.stepper.step(step, measure=step == 2)
        losses.append({name: float(value) for name, value in metrics.items()})
        # The carried state of streams is gathered by it.
        digests.append(digest(task.state_dict()))
    return {
        "digests": digests,
        "losses": losses,
        "skipped": int(built.stepper.skipped),
        "evaluation": task.evaluate(),
        "state": task.state_dict(),
    }


def exchanged(ranks) -> dict:
    """Return all sums of ranks that have every W-th of held-out batches of 3, 3, 2 samples."""
    whole = torch.arange(16.0).reshape(8, 2).split(3)
    own = whole[ranks.rank :: ranks.world]
    sums, count = [batch.double().sum(0) for batch in own], sum(map(len, own))
    return {"in order": ranks.in_order(own), "mean": ranks.mean(sums, count)}


def found_by(ranks, cases: dict) -> dict:
    """Return the found values of `taken`, by case, and what ranks exchange."""
    torch.set_num_threads(1)
    found = {name: taken(own["overrides"], ranks, own["plants"]) for name, own in cases.items()}
    return found | {"exchanged": exchanged(ranks)}


def environment_of(rank: int, world: int, port: int) -> dict[str, str]:
    """As torchrun would set it."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in own.items()}


def be(rank: int, world: int, port: int, cases: dict, out: Path) -> None:
    """Be a rank, in a process of its own, which writes what it found to `out`/RANK.pt."""
    os.environ.update(environment_of(rank, world, port))
    ranks = RankGroup(rank_info_from(), torch.device("cpu"), 60.0)
    torch.save(found_by(ranks, cases), out / f"{rank}.pt")
    ranks.leave(0)
