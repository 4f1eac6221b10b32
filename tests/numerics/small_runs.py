"""One small run of every task, as overrides, and what tests do with several of them."""

import json

import torch
from torch.utils.tensorboard import SummaryWriter

from mprun.cli import main
from mprun.numerics.probe import Probe, chosen_modules
from mprun.numerics.probing import Probing
from mprun.tasks import Classification

from ..helpers import assert_same_bits, making, mixed

SMALL = {
    "resnet50": ["model=resnet50", "optim=sgd", "data.batch_size=4"],
    "lstm_lm": [
        *"model=lstm_lm model.embedding_size=12 model.hidden_size=16 model.dropout=0.3".split(),
        *"data=synthetic_tokens data.vocab_size=50 data.batch_size=4".split(),
        *"data.sequence_length=5 data.train_tokens=512 train.clip_norm=0.05".split(),
    ],
    "dcgan": [
        *"model=dcgan data.batch_size=4 data.image_size=32".split(),
        *"model.generator_width=8 model.discriminator_width=8".split(),
    ],
    "conv_autoencoder": ["model=conv_autoencoder", "data.batch_size=4", "train.accumulate=2"],
    "alexnet": ["model=alexnet_2012", "model.width=0.125", "optim=sgd_alexnet"]
    + ["data=digits_64", "data.batch_size=2"],
}


def classification(model, data, mode="fp32"):
    """The task of training a network on labelled batches, by plain SGD."""
    learner = mixed(model, mode, making(torch.optim.SGD, 0.1))
    context, scale = learner.prepared.forward_context, learner.prepared.loss_scale
    return Classification(learner, data, context.policy, context, scale)


def probed(task, patterns=()):
    """What a probe finds of each learner in the first step."""
    with Probe(task, chosen_modules(task.learners, patterns)) as probe:
        metrics = task.train_step(0)
    learners, (loss,) = probe.read([metrics["loss"]])
    assert_same_bits(loss, metrics["loss"].item())
    return learners


def as_json(capsys, *words):
    """Return the output of `mprun words --json`, parsed."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def watched_steps(built, directory, steps, every=0, shadow_every=0, patterns=()):
    """Take `steps` steps, watched where due; the losses. every=0: no probing at all."""
    losses, writer = [], SummaryWriter(str(directory))
    asked = {"every": every, "shadow_every": shadow_every, "modules": patterns}
    probing = Probing(built.task, directory, writer, **asked) if every else None
    for index in range(steps):

        def take(index=index):
            return built.task.train_step(index, measure=True)

        watched = probing is not None and probing.due(index + 1)
        metrics = probing.watch(index + 1, index, take) if watched else take()
        losses.append(torch.stack([metrics[name].float() for name in sorted(metrics)]))
    writer.close()
    return torch.stack(losses)
