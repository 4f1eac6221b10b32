"""A few training steps of a built run, with skips where asked for, and all that they gave."""

import torch

from ..helpers import assert_same_bits
from ..tables import with_extensions


def of(line: str) -> list[str]:
    """The overrides of one line, as a user types them."""
    return line.split()


IMAGES = of("data=synthetic_images data.channels=1 data.batch_size=4 data.train_size=32")
TANH = [*IMAGES, *of("data.eval_size=8 data.image_size=32 data.value_range=tanh")]
# Six steps to an epoch, so that a language model's state starts anew within a test.
TOKENS = of("data=synthetic_tokens data.vocab_size=50 data.batch_size=4 data.sequence_length=4")
TOKENS += ["data.train_tokens=96"]
SMALL_LSTM = of("model.embedding_size=8 model.hidden_size=8 model.num_layers=1")
SMALL = {
    "dropout": of("model=alexnet optim=sgd_alexnet data=digits_64 data.batch_size=2 optim.lr=1e-3"),
    "batch_norm": of("model=resnet50 optim=sgd data=digits_32 data.batch_size=8 optim.lr=1e-4"),
    "language_model": ["model=lstm_lm", *TOKENS, *SMALL_LSTM, "model.dropout=0.3"],
    "sampled": of("model=biglstm model.projection_size=4 model.sampled_softmax=12")
    + [*TOKENS, *SMALL_LSTM],
    "transformer": of("model=gpt model.hidden_size=8 model.num_heads=2 model.positions=rotary")
    + [*TOKENS, "model.qk_norm=true", "optim.eps=1e-3"],
    "gan": ["model=dcgan", *TANH, "model.generator_width=4", "model.discriminator_width=4"],
    "reconstruction": ["model=conv_autoencoder", *TANH, "model.width=2", "model.code_size=4"],
}
SMALL = with_extensions("SMALL", SMALL)


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


def twins(build_run, *overrides, steps, bad=(), plant=lambda built: None):
    """Training that was eager, and a run like its own at the start, random state included.

    plant: called with each of the two before the training.
    """
    eager, built = build_run(*overrides), build_run(*overrides)
    plant(eager)
    plant(built)
    random = torch.get_rng_state()
    expected = Training(eager, eager.task.train_step, bad).steps(0, steps)
    torch.set_rng_state(random)
    return expected, built


def assert_same_training(one, other):
    """Metrics of all steps and the state at the end, bit for bit."""
    assert_same_rows(one, other)
    assert_same_bits(one.built.task.state_dict(), other.built.task.state_dict())


def assert_same_rows(one, other):
    """Every metric that both have, bit for bit; a recorded step has all that it has anyway."""
    for a, b in zip(one.rows, other.rows, strict=True):
        assert {"loss", "loss_scale"} <= a.keys() and a.keys() <= b.keys()
        assert_same_bits(
            {name: value.float() for name, value in a.items()},
            {name: b[name].float() for name in a},
        )
