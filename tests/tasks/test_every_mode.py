"""Every model in every mode: two steps, the dtypes of the mode, and what was emulated."""

import itertools

import pytest
import torch
from torch import nn

from mprun.errors import BadInput
from mprun.precision.module_dtypes import NORM_LAYERS

from ..helpers import TINY_AUTOENCODER, TINY_GAN, TINY_GPT, TINY_LM, TINY_MOE, raises_line
from ..numerics.small_runs import SMALL
from ..shipped import OF_ANY_NETWORK
from ..tables import with_extensions

NARROW = ["model.width=0.0625", "optim=sgd", "optim.lr=1e-3", "data.batch_size=8"]
DEEP = {
    "resnet50_preact": ["model=resnet50_preact", *NARROW],
    "vgg16": ["model=vgg16", *NARROW, "data=digits_32"],
    "googlenet": ["model=googlenet", *NARROW, "data=digits_32"],
    "inception_v2": ["model=inception_v2", *NARROW, "data=digits_32"],
    "inception_v3": ["model=inception_v3", *NARROW, "data.image_size=75"],
}
MODELS = {
    "alexnet": SMALL["alexnet"],
    # Smaller batches overflow FP16 in the backward pass of BatchNorm over 1x1 maps.
    "resnet50": ["model=resnet50", "optim=sgd", "data.batch_size=8"],
    "lstm_lm": TINY_LM,
    "gpt": TINY_GPT,
    "gpt_llama": [*TINY_GPT, "model=gpt_llama", "model.qk_norm=true", "model.attention=manual"],
    "gpt_moe": [*TINY_MOE, "model.shared_size=16", "model.router=mode"],
    "dcgan": TINY_GAN,
    "conv_autoencoder": TINY_AUTOENCODER,
    **DEEP,
}
MODELS = with_extensions("MODELS", MODELS)
# name: (parameters as they are computed with, those of norm layers, optimizer state)
F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16
EXPECTED = {
    "fp32": (F32, F32, F32),
    "fp16_naive": (F16, F16, F16),
    "fp16_master": (F16, F32, F32),
    "fp16_master_scaled": (F16, F32, F32),
    "amp": (F32, F32, F32),
    "bf16_naive": (B16, B16, B16),
    "bf16_master": (B16, F32, F32),
    "amp_bf16": (F32, F32, F32),
    "bf16_kahan": (B16, F32, F32),
    "bf16_stochastic": (B16, F32, F32),
}
BY_ADAM = ("dcgan", "conv_autoencoder", "gpt", "gpt_llama", "gpt_moe")
CONVOLUTIONS = {"forward convolution", "backward convolution_backward"}
MATRICES = {"forward addmm", "backward mm"}
LSTM = {"forward lstm", "backward lstm"}
LINEAR = {"forward mm", "backward mm"}
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = {
    "alexnet": CONVOLUTIONS | MATRICES,
    "resnet50": CONVOLUTIONS | MATRICES,
    "lstm_lm": LSTM | MATRICES,
    "gpt": LINEAR | {f"forward {ATTENTION}", f"backward {ATTENTION}_backward"},
    "gpt_llama": LINEAR | {"forward bmm", "backward bmm"},
    "gpt_moe": LINEAR | {f"forward {ATTENTION}", f"backward {ATTENTION}_backward"},
    "dcgan": CONVOLUTIONS,
    "conv_autoencoder": CONVOLUTIONS,
    **dict.fromkeys(DEEP, CONVOLUTIONS | MATRICES),
}
PRODUCTS = with_extensions("PRODUCTS", PRODUCTS)


def test_every_mode_is_listed():
    """Those in 8 bits are of linear layers: tests/precision/test_scaled_products.py."""
    assert EXPECTED.keys() == {*OF_ANY_NETWORK} - {"tf32"}


# By default every mode with one of the small networks.
QUICK = set(zip(itertools.cycle(["lstm_lm", "gpt", "conv_autoencoder"]), EXPECTED, strict=False))


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(MODELS, EXPECTED)
    ],
)
def test_two_steps(build_run, model, mode):
    built = build_run(*MODELS[model], f"precision={mode}")
    parameter_dtype, norm_dtype, state_dtype = EXPECTED[mode]
    losses = [built.task.train_step(step)["loss"] for step in range(2)]
    # Adam's eps of 1e-8 is 0 in FP16, and 0/0 from the first update on (test_paper_examples).
    if mode == "fp16_naive" and model in BY_ADAM:
        assert not torch.isfinite(losses[1])
    else:
        assert torch.isfinite(torch.stack(losses)).all()
    for learner in built.task.learners.values():
        kept = mode in ("fp16_naive", "bf16_naive", "bf16_kahan", "bf16_stochastic")
        computed = {id(own): dtype for own, dtype in learner.steps.computed()}
        for module in learner.model.modules():
            expected = norm_dtype if isinstance(module, NORM_LAYERS) else parameter_dtype
            if getattr(module, "computes_in_fp32", False):
                expected = F32
            own = [*module.parameters(recurse=False)]
            assert {computed[id(weight)] for weight in own} <= {expected}
            tensors = [*own, *module.buffers(recurse=False)]
            dtypes = {t.dtype for t in tensors if t.is_floating_point()}
            assert dtypes <= {expected if kept else F32}
        states = {
            value.dtype
            for state in learner.steps.state_by_name().values()
            for key, value in state.items()
            if key not in ("step", "compensation")
        }
        assert states <= {state_dtype}
    expected = set() if mode == "fp32" else set(PRODUCTS[model])
    # Under autocast the embedding table is FP32 and so is its gradient.
    models = [learner.model for learner in built.task.learners.values()]
    embeds = any(isinstance(module, nn.Embedding) for one in models for module in one.modules())
    if embeds and parameter_dtype != F32:
        expected.add("backward embedding_dense_backward")
    assert set(built.forward_context.rerouted()) == expected


def test_a_cpu_refuses_tf32(build_run):
    with raises_line(BadInput, "TF32"):
        build_run(*TINY_LM, "precision=tf32")
