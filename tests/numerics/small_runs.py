"""One small run of every task, as overrides, and what tests do with several of them."""

import json

import torch
from torch.utils.tensorboard import SummaryWriter

from mprun.cli import main
from mprun.numerics.probing import Probing

SMALL = {
    "resnet50": ["model=resnet50", "optim=sgd", "data.batch_size=4"],
    "lstm_lm": [
        "model=lstm_lm",
        "model.embedding_size=12",
        "model.hidden_size=16",
        "model.dropout=0.3",
        "data=synthetic_tokens",
        "data.vocab_size=50",
        "data.batch_size=4",
        "data.sequence_length=5",
        "data.train_tokens=512",
        "train.clip_norm=0.05",
    ],
    "dcgan": [
        "model=dcgan",
        "data.batch_size=4",
        "data.image_size=32",
        "model.generator_width=8",
        "model.discriminator_width=8",
    ],
    "conv_autoencoder": ["model=conv_autoencoder", "data.batch_size=4", "train.accumulate=2"],
    "alexnet": [
        "model=alexnet_2012",
        "model.width=0.125",
        "optim=sgd_alexnet",
        "data=digits_64",
        "data.batch_size=2",
    ],
}


def as_json(capsys, *words):
    """Return the output of `mprun words --json`, parsed."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def watched_steps(built, directory, steps, every=0, shadow_every=0, patterns=()):
    """Take `steps` steps, watched where due; the losses. every=0: no probing at all."""
    losses = []
    writer = SummaryWriter(str(directory)) if every else None
    probing = None
    if every:
        asked = {"every": every, "shadow_every": shadow_every, "modules": patterns}
        probing = Probing(built.task, directory, writer, **asked)
    for index in range(steps):

        def take(index=index):
            return built.task.train_step(index, measure=True)

        watched = probing is not None and probing.due(index + 1)
        metrics = probing.watch(index + 1, index, take) if watched else take()
        losses.append(torch.stack([metrics[name].float() for name in sorted(metrics)]))
    if writer is not None:
        writer.close()
    return torch.stack(losses)


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
