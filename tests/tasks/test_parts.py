"""An update from several micro-batches on one rank, of which each of several ranks takes a share:
statistics, chances, two networks in turn."""

import copy

import torch
from torch.nn import functional as F

from mprun.distributed.ranks import seed_micro_batch

from ..helpers import TINY_GAN

CPU = torch.device("cpu")
SMALL = [
    *("model=custom", "model.factory=tests.distributed.of_a_rank:small", "data=digits_32"),
    *("data.batch_size=4", "threads=1"),
]


def test_batch_norm_statistics_are_the_mean_over_micro_batches(build_run):
    """Each micro-batch moves the statistics from the start of the step, not one after the other."""
    built = build_run(*SMALL, "train.accumulate=3")
    model = built.task.learner.model
    means, batches = [], int(model.body[1].num_batches_tracked)
    for number in range(3):
        own = copy.deepcopy(model)
        seed_micro_batch(CPU, built.task.seed, 0, number)
        own(built.data.train_batch(number)[0])
        means.append((own.body[1].running_mean, own.body[1].running_var))
    built.task.train_step(0)
    moved = model.body[1].running_mean, model.body[1].running_var
    for found, parts in zip(moved, zip(*means, strict=True), strict=True):
        expected = torch.stack(parts).double().mean(0).float()
        torch.testing.assert_close(found, expected, rtol=4 * 2**-24, atol=1e-9)
    assert model.body[1].num_batches_tracked == batches + 1


def test_what_is_drawn_does_not_depend_on_what_was_drawn_before(build_run):
    losses = []
    for drawn in (0, 7):
        built = build_run(*SMALL, "train.accumulate=2")
        torch.rand(drawn)
        losses.append(built.stepper.step(0)["loss"])
    assert losses[0] == losses[1]


def test_a_gan_takes_the_mean_of_its_micro_batches(build_run):
    """Against a loop by hand in FP32: both networks, both losses, BatchNorm."""
    overrides = [*TINY_GAN, "data.batch_size=4", "train.accumulate=2"]
    overrides += ["optim=sgd_plain", "optim.lr=0.1"]
    built = build_run(*overrides)
    task = built.task
    generator, discriminator = copy.deepcopy(task.g.model), copy.deepcopy(task.d.model)
    built.stepper.step(0)

    def updated(model, losses):
        gradients = torch.autograd.grad(sum(losses) / 2, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)

    def bce(model, images, target):
        logits = model(images)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))

    def made(number):
        seed_micro_batch(CPU, task.seed, 0, number)
        return generator(torch.randn(4, task.latent_size))

    real = [built.data.train_batch(number)[0] for number in range(2)]
    losses = [
        bce(discriminator, real[n], 1.0) + bce(discriminator, made(n).detach(), 0.0)
        for n in range(2)
    ]
    updated(discriminator, losses)
    # The gradient of a sum is the sum of gradients: one graph of both micro-batches.
    updated(generator, [bce(discriminator, made(n), 1.0) for n in range(2)])
    for own, expected in ((task.d.model, discriminator), (task.g.model, generator)):
        for name, parameter in own.named_parameters():
            other = dict(expected.named_parameters())[name]
            torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6)
