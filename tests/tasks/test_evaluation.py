"""Evaluation measures the master weights in FP32 and leaves no trace in the training."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from mprun.models.classifiers import resnet50
from mprun.models.dcgan import ConvAutoencoder
from mprun.precision import read_math_flags

from ..helpers import TINY_GAN, TINY_LM, assert_same_bits
from ..shipped import OF_ANY_NETWORK

RUNS = {
    "dcgan": [*TINY_GAN, "data.batch_size=4"],
    "lstm_lm": [*TINY_LM, "model.dropout=0.2"],
}
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
    assert values["top1"] == 100 * (logits.argmax(1) == labels).double().mean().item()
    top5 = (logits.topk(5, dim=1).indices == labels[:, None]).any(1)
    assert values["top5"] == 100 * top5.double().mean().item()
