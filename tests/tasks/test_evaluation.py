"""Evaluation measures the master weights in FP32 and leaves no trace in the training."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from mprun.models.classifiers import resnet50
from mprun.models.dcgan import ConvAutoencoder
from mprun.precision import read_math_flags
from mprun.tasks import Classification

from ..helpers import TINY_GAN, TINY_LM, assert_same_bits, making, mixed
from ..shipped import OF_ANY_NETWORK

RUNS = {"dcgan": [*TINY_GAN, "data.batch_size=4"], "lstm_lm": [*TINY_LM, "model.dropout=0.2"]}
AUTOENCODER = ["model=conv_autoencoder", "data.image_size=32", "data.batch_size=100"]
AUTOENCODER += ["model.width=4", "optim=sgd"]
EVERY_MODE = [(mode, "fp32") for mode in sorted(set(OF_ANY_NETWORK) - {"tf32"})]


def final_state(task, evaluate):
    rows = []
    for step in range(4):
        rows.append(task.train_step(step))
        if evaluate and step == 1:
            before = torch.get_rng_state(), read_math_flags()
            first = task.evaluate()
            assert torch.equal(torch.get_rng_state(), before[0])
            assert read_math_flags() == before[1]
            assert task.evaluate() == pytest.approx(first, rel=0, abs=0, nan_ok=True)
    return tree_leaves([rows, task.state_dict()])


@pytest.mark.parametrize(
    ("mode", "evaluated_in"), [*EVERY_MODE, ("amp", "mode"), ("fp16_naive", "mode")]
)
@pytest.mark.parametrize("model", RUNS)
@pytest.mark.few(2)
def test_training_does_not_notice_an_evaluation(build_run, model, mode, evaluated_in):
    overrides = [*RUNS[model], f"precision={mode}", f"train.eval_arithmetic={evaluated_in}"]
    plain, evaluated = (
        final_state(build_run(*overrides).task, evaluate) for evaluate in (False, True)
    )
    assert sum(map(torch.is_tensor, plain)) > 20
    assert_same_bits(plain, evaluated)  # naive FP16 with Adam is NaN, in both


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp16_master", "amp", "fp16_naive"])
def test_the_metric_is_that_of_the_master_weights_in_fp32(build_run, mode):
    task = build_run(*AUTOENCODER, f"precision={mode}").task
    for step in range(3):
        task.train_step(step)
    weights = {name: own.detach() for name, own in task.learner.named.items()}
    batches = [images for images, _ in task.data.eval_batches()]

    def mean_with(weights):
        reference = ConvAutoencoder(32, 32, 4, 1)
        reference.load_state_dict(weights)
        with torch.no_grad():
            pairs = [(reference(images).double(), images.double()) for images in batches]
        total = sum(F.mse_loss(*pair, reduction="sum").item() for pair in pairs)
        return total / sum(images.numel() for images in batches)

    if mode == "fp16_master":
        for weight in weights.values():
            weight.copy_(weight.half().float() * (1 + 2.0**-12))  # what FP16 does not show
        rounded = {name: weight.half().float() for name, weight in weights.items()}
        assert mean_with(rounded) / mean_with(weights) != pytest.approx(1, rel=1e-5)
    # Sums of squares in FP32 over a batch against FP64: 2^-24 each, added pairwise.
    assert task.evaluate()["loss"] == pytest.approx(mean_with(weights), rel=1e-6)


@pytest.mark.parametrize("classes", [3, 8])
def test_classification_counts_each_held_out_image_once(classes):
    torch.manual_seed(1)
    learner = mixed(nn.Linear(5, classes), "fp32", making(torch.optim.SGD, 0.1))
    context = learner.prepared.forward_context
    images, labels = torch.randn(20, 5), torch.randint(classes, (20,))
    batches = [*zip(images.split(6), labels.split(6), strict=True)]
    data = SimpleNamespace(samples_per_batch=6, batches_per_epoch=3, eval_batches=lambda: batches)
    task = Classification(learner, data, context.policy, context, learner.prepared.loss_scale)
    said, task.on_evaluated = [], lambda done: said.append(done)
    values = task.evaluate()
    assert said == [6, 12, 18, 20]
    weight, bias = (own.detach().double() for own in learner.model.parameters())
    logits = images.double() @ weight.T + bias
    rank = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert values["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=2**-20)
    assert values["top1"] == pytest.approx(100 * (rank == 0).double().mean().item())
    assert values["top5"] == pytest.approx(100 * (rank < 5).double().mean().item())
    assert values["top1"] < 100


def test_a_language_model_s_evaluation_carries_its_state(build_run):
    task = build_run(*TINY_LM).task
    model, hidden, total, count = task.learner.model.eval(), None, 0.0, 0
    with torch.no_grad():
        for tokens, targets in task.data.eval_batches():
            logits, hidden = model(tokens, hidden)
            labels = targets.flatten()
            loss = F.cross_entropy(logits.flatten(0, 1).double(), labels, reduction="sum")
            total, count = total + loss.item(), count + len(labels)
    found = task.evaluate()
    assert found["loss"] == pytest.approx(total / count, rel=2**-20)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=2**-18)


def test_a_gan_is_evaluated_on_all_images_and_64_codes(build_run):
    task = build_run(*TINY_GAN, "data.eval_size=20").task
    codes = torch.randn(64, 8, generator=torch.Generator().manual_seed(2018))
    with torch.no_grad():
        made = task.g.model.eval()(codes)
        fake = task.d.model.eval()(made).double()
        real = [task.d.model(images).double() for images, _ in task.data.eval_batches()]
    real, bce = torch.cat(real), F.binary_cross_entropy_with_logits
    d_loss = bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))
    expected = {"d_loss": d_loss.item(), "g_loss": bce(fake, torch.ones_like(fake)).item()}
    expected["loss"] = sum(expected.values())
    assert task.evaluate() == pytest.approx(expected, rel=2**-18)
    torch.testing.assert_close(task.samples(), (made + 1) / 2, rtol=0, atol=2**-20)


@pytest.mark.slow
def test_evaluation_in_the_mode_s_own_arithmetic_uses_the_model_itself(build_run):
    task = build_run(*AUTOENCODER, "precision=fp16_master").task
    own = build_run(*AUTOENCODER, "precision=fp16_master", "train.eval_arithmetic=mode").task
    assert task.evaluate() != own.evaluate()
    assert own.learner.model.training
    assert own.forward_context.rerouted() and not task.forward_context.rerouted()


@pytest.mark.slow
def test_evaluation_uses_running_statistics(build_run):
    task = build_run(
        "model=resnet50", "data=synthetic_images", "data.batch_size=8", "data.eval_size=8"
    ).task
    task.train_step(0)
    reference = resnet50(10)
    reference.load_state_dict(task.learner.model.state_dict())
    images, labels = next(iter(task.data.eval_batches()))
    with torch.no_grad():
        logits = reference.eval()(images)
    values = task.evaluate()
    assert values["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
