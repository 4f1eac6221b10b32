"""A few training steps of a built run, with skips where asked for, and all that they gave."""

import torch
from torch.utils._pytree import tree_flatten, tree_map

IMAGES = [
    "data=synthetic_images",
    "data.channels=1",
    "data.batch_size=4",
    "data.train_size=32",
    "data.eval_size=8",
]
TANH = [*IMAGES, "data.image_size=32", "data.value_range=tanh"]
# Six steps to an epoch, so that a language model's state starts anew within a test.
TOKENS = [
    "data=synthetic_tokens",
    "data.vocab_size=50",
    "data.batch_size=4",
    "data.sequence_length=4",
    "data.train_tokens=96",
]
SMALL_LSTM = ["model.embedding_size=8", "model.hidden_size=8", "model.num_layers=1"]
SMALL = {
    "dropout": [
        "model=alexnet",
        "optim=sgd_alexnet",
        "data=digits_64",
        "data.batch_size=2",
        "optim.lr=1e-3",
    ],
    "batch_norm": [
        "model=resnet50",
        "optim=sgd",
        "data=digits_32",
        "data.batch_size=8",
        "optim.lr=1e-4",
    ],
    "language_model": ["model=lstm_lm", *TOKENS, *SMALL_LSTM, "model.dropout=0.3"],
    "sampled": [
        "model=biglstm",
        *TOKENS,
        *SMALL_LSTM,
        "model.projection_size=4",
        "model.sampled_softmax=12",
    ],
    "transformer": [
        "model=gpt",
        *TOKENS,
        "model.hidden_size=8",
        "model.num_heads=2",
        "model.positions=rotary",
        "model.qk_norm=true",
        "optim.eps=1e-3",
    ],
    "translation": [
        "model=seq2seq",
        "model.embedding_size=8",
        "model.hidden_size=8",
        "model.dropout=0.3",
        "data.batch_size=4",
        "data.max_length=8",
    ],
    "gan": ["model=dcgan", *TANH, "model.generator_width=4", "model.discriminator_width=4"],
    "detection": ["model=ssd_mini", "data.batch_size=2", "data.train_size=16", "data.eval_size=4"],
    "two_stages": [
        "model=faster_rcnn",
        "data.batch_size=2",
        "data.train_size=16",
        "data.eval_size=4",
    ],
    "reconstruction": ["model=conv_autoencoder", *TANH, "model.width=2", "model.code_size=4"],
    "speech": [
        "model=deep_speech2",
        "model.channels=2",
        "model.hidden_size=8",
        "data.batch_size=4",
    ],
}


def plant(task):
    """A 0-dim tensor that the gradient of one weight is multiplied by."""
    learner = next(iter(task.learners.values()))
    weight = [p for p in learner.model.parameters() if p.requires_grad][-1]
    factor = torch.ones((), dtype=weight.dtype, device=weight.device)
    weight.register_hook(lambda gradient: gradient * factor)
    return factor


class Training:
    """Takes steps as the loop does: the rate by applied updates, the gradient norm now and then.

    take: `task.train_step` or a stepper's `step`. bad: steps whose gradient is not finite. Every
    step's metrics are kept as they were returned.
    """

    def __init__(self, built, take, bad=()):
        self.built, self.take, self.bad = built, take, set(bad)
        self.factor = plant(built.task)
        self.skipped = torch.zeros((), dtype=torch.int64, device=built.device)
        self.rows = []

    def steps(self, first, last):
        for index in range(first, last):
            self.built.rate.apply(index, self.skipped)
            self.factor.fill_(float("inf") if index in self.bad else 1.0)
            metrics = self.take(index, measure=index % 3 == 2)
            if "found_inf" in metrics:
                self.skipped.add_(metrics["found_inf"].to(torch.int64))
            self.rows.append(metrics)
        return self

    def values(self, name):
        return torch.stack([row[name].float() for row in self.rows])


def copy_of(state):
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)


def assert_same_state(one, other):
    """Bit for bit, NaN counting as itself."""
    (a, form_a), (b, form_b) = tree_flatten(one), tree_flatten(other)
    assert form_a == form_b and len(a) > 3
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and torch.equal(x.nan_to_num(7), y.nan_to_num(7))
        else:
            assert x == y


def assert_same_rows(one, other):
    """Every metric that both have, bit for bit; a recorded step has all that it has anyway."""
    for a, b in zip(one.rows, other.rows, strict=True):
        assert {"loss", "loss_scale"} <= a.keys() and a.keys() <= b.keys()
        for name, value in a.items():
            assert torch.equal(value.float().nan_to_num(7), b[name].float().nan_to_num(7)), name
