"""Small runs that fail in a known way, made as a user's run is made."""

from collections.abc import Callable

import torch
from torch import nn

from mprun.config.compose import compose_config
from mprun.models.lstm import LSTMLanguageModel
from mprun.training.run import attempt, new_record, prepare

CPU = torch.device("cpu")
LM = (
    "model=lstm_lm data=synthetic_tokens data.vocab_size=48 data.train_tokens=2000 "
    "data.eval_tokens=200 data.batch_size=4 data.sequence_length=6 model.hidden_size=16 "
    "model.embedding_size=16 model.num_layers=1"
).split()
_IMAGES = (
    "data=synthetic_images data.image_size=32 data.channels=1 data.value_range=tanh "
    "data.batch_size=4 data.train_size=32 data.eval_size=8"
).split()
AUTOENCODER = ["model=conv_autoencoder", *_IMAGES, "model.width=4", "model.code_size=8"]
GAN = ["model=dcgan", *_IMAGES, "model.generator_width=4", "model.discriminator_width=4"]
GAN += ["model.latent_size=8"]
SGD = ["optim=sgd_plain", "optim.lr=0.01"]
NAIVE_ADAM = [*LM, "precision=fp16_naive", "optim=adam"]  # whose eps is 0 in FP16


def run(folder, *overrides, plant=None, steps=6):
    """Train below `folder` and return (run directory, exit code). plant: called with the Built."""
    own = [f"train.steps={steps}", "device=cpu", "threads=1"]
    composed = compose_config(["train.eval_every=0", *overrides, *own])
    built = prepare(composed.config, CPU, 1)
    if plant is not None:
        plant(built)
    directory = folder / "run"
    directory.mkdir(parents=True, exist_ok=True)
    code = attempt(composed.config, built, new_record(directory, composed))
    return directory, code


@torch.no_grad()
def set_weight(built, name, value, learner="model"):
    """Fill a weight with a number or a tensor of its shape."""
    built.task.learners[learner].named[name].copy_(torch.as_tensor(value))


@torch.no_grad()
def multiply_weight(built, name, factor, learner="model"):
    """Scale a weight."""
    built.task.learners[learner].named[name].mul_(factor)


class ChangedData:
    """A data source whose training batches go through a function of (index, batch)."""

    def __init__(self, source, change):
        self.source, self.change = source, change

    def train_batch(self, index):
        return self.change(index, self.source.train_batch(index))

    def __getattr__(self, name):
        return getattr(self.source, name)


def with_data(change):
    """A plant that changes the training batches."""

    def plant(built):
        built.task.data = ChangedData(built.task.data, change)

    return plant


def replace_in_lm(monkeypatch, make: Callable[[], nn.Module]):
    """Every language model from now on has a new layer between embedding and LSTM ("dropout")."""

    class Planted(LSTMLanguageModel):
        def __init__(self, *sizes, **named):
            super().__init__(*sizes, **named)
            self.dropout = make()

        def forward(self, tokens, state=None):
            if state is None:
                state = self.initial_state(tokens.shape[1])
            outputs, state = self.lstm(self.dropout(self.embedding(tokens)), state)
            return self.output(outputs), state

    monkeypatch.setattr("mprun.models.lstm.LSTMLanguageModel", Planted)
