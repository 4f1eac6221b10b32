"""The default measurements: models and sizes, as plain data."""

from dataclasses import replace
from functools import partial

from mprun.extensions.bench.cases import BenchGroup
from mprun.extensions.bench.contest import CPU_MODES, GPU_MODES

# The modes of a suite that are measured when other tools take part: each adds that many processes.
MODES_WITH_PEERS = ("fp32", "tf32", "fp16_master_scaled", "amp")

# A constant rate: the loops of peers know no other, and a step costs the same with any.
PLAIN_RATE = (
    *("optim.schedule=constant", "optim.warmup_updates=0", "optim.warmup_epochs=0"),
    *("optim.milestones=[]", "optim.constant_epochs=null"),
)
_BEST_MODES = ("tf32", "fp16_master_scaled", "amp")  # measured with mprun's best settings too


_group = partial(BenchGroup, best_modes=_BEST_MODES, compile=False)


def _images(size: int, batch: int, classes: int, *more: str) -> tuple[str, ...]:
    return (
        "data=synthetic_images",
        f"data.image_size={size}",
        f"data.num_classes={classes}",
        f"data.batch_size={batch}",
        f"data.train_size={4 * batch}",  # the four rotating batches
        "data.eval_size=1",
        *more,
    )


def _tokens(words: int, time: int, batch: int, *more: str) -> tuple[str, ...]:
    return (
        "data=synthetic_tokens",
        f"data.vocab_size={words}",
        f"data.sequence_length={time}",
        f"data.batch_size={batch}",
        f"data.train_tokens={40 * time * batch}",
        *more,
    )


def _resnet(batch: int, weight: float) -> BenchGroup:
    overrides = ("model=resnet50", "optim=sgd", *_images(224, batch, 1000))
    large = {"best_modes": ("fp16_master_scaled", "amp"), "compile": True}
    more = large if batch >= 128 else {}
    return _group(f"ResNet-50 b{batch}", overrides, GPU_MODES, weight, **more)


def _alexnet(batch: int, weight: float) -> BenchGroup:
    overrides = ("model=alexnet", "optim=sgd_alexnet", *_images(224, batch, 1000))
    return _group(f"AlexNet b{batch}", overrides, GPU_MODES, weight)


def _dcgan(batch: int, weight: float) -> BenchGroup:
    # Without fp16_naive: Adam's eps is 0 in FP16, and the speed of NaN is meaningless.
    modes = tuple(mode for mode in GPU_MODES if mode != "fp16_naive")
    overrides = ("model=dcgan", *_images(64, batch, 2, "data.value_range=tanh"))
    return _group(f"DCGAN b{batch}", overrides, modes, weight)


_LSTM = _group(
    "LSTM LM b128",
    (
        "model=lstm_lm_projected",
        "model.embedding_size=512",
        "model.hidden_size=1024",
        "model.projection_size=512",
        "model.dropout=0",
        *_tokens(32_000, 35, 128),
    ),
    GPU_MODES,
    60,
)
_BIGLSTM = _group(
    "bigLSTM b256",
    ("model=biglstm", "model.dropout=0", *_tokens(793_472, 20, 256)),
    ("tf32", "fp16_master_scaled", "amp"),
    50,
)

_GPT2 = _group(
    "GPT-2 b12",
    ("model=gpt2", *PLAIN_RATE, *_tokens(50_304, 1024, 12)),
    ("fp32", "tf32", "amp_bf16", "bf16_stochastic", "fp8_tensorwise", "fp8_rowwise"),
    100,
    best_modes=("amp_bf16", "fp8_tensorwise"),
    compile=True,
)


def _ratios(group: BenchGroup, modes: tuple[str, ...], weight: float) -> BenchGroup:
    return replace(group, modes=modes, best_modes=modes, weight=weight, compile=True)


# `--ratios`: each network in the modes that a user would choose, eager and compiled, beside
# torch.amp, plain and compiled. The most important ones come first.
GPU_RATIOS = (
    _ratios(_resnet(256, 0), ("amp",), 60),
    _ratios(_GPT2, ("amp_bf16", "fp8_tensorwise"), 75),
    _ratios(_alexnet(512, 0), ("amp",), 40),
    _ratios(_BIGLSTM, ("amp",), 40),
    _ratios(_dcgan(128, 0), ("amp",), 40),
)

# The most important models come first: a budget may end before the last.
GPU_SUITE = (
    _resnet(256, 200),
    _dcgan(128, 60),
    _LSTM,
    _alexnet(512, 50),
    _alexnet(128, 40),
    _resnet(32, 50),
    _BIGLSTM,
    _dcgan(512, 30),
    _GPT2,
)

CPU_SUITE = (
    _group(
        "tiny LM b16",
        (
            "model=lstm_lm",
            "model.embedding_size=128",
            "model.hidden_size=128",
            *_tokens(2_000, 20, 16),
        ),
        CPU_MODES,
        30,
    ),
    _group(
        "DCGAN 32 px b32",
        (
            "model=dcgan",
            "model.generator_width=32",
            "model.discriminator_width=32",
            *_images(32, 32, 2, "data.value_range=tanh"),
        ),
        CPU_MODES,
        30,
    ),
    _group(
        "ResNet-50 32 px b32", ("model=resnet50", "optim=sgd", *_images(32, 32, 10)), CPU_MODES, 45
    ),
)


# The five networks at 20 to 300 ms a step of one core, for a CPU that multiplies in BF16.
_NATIVE_MODES = ("amp_bf16", "bf16_master", "bf16_naive")
_native = partial(
    BenchGroup, modes=_NATIVE_MODES, best_modes=("amp_bf16", "bf16_master"), compile=True
)
NATIVE_SUITE = (
    _native(
        "GPT 4 x 256 b4",
        (
            "model=gpt2",
            "model.hidden_size=256",
            "model.num_layers=4",
            "model.num_heads=4",
            "model.context_length=128",
            *PLAIN_RATE,
            *_tokens(8_192, 128, 4),
        ),
        weight=40,
    ),
    _native(
        "DCGAN 32 px b32",
        (
            "model=dcgan",
            "model.generator_width=32",
            "model.discriminator_width=32",
            *_images(32, 32, 2, "data.value_range=tanh"),
        ),
        weight=40,
    ),
    _native(
        "bigLSTM 512 b16",
        (
            "model=biglstm",
            "model.embedding_size=128",
            "model.hidden_size=512",
            "model.projection_size=128",
            "model.dropout=0",
            *_tokens(16_384, 20, 16),
        ),
        weight=40,
    ),
    _native(
        "AlexNet 224 px b4",
        ("model=alexnet", "optim=sgd_alexnet", *_images(224, 4, 1000)),
        weight=40,
    ),
    _native(
        "ResNet-50 32 px b16", ("model=resnet50", "optim=sgd", *_images(32, 16, 10)), weight=80
    ),
)


def suite_of(
    device_type: str, *, ratios: bool = False, native: bool = False
) -> tuple[BenchGroup, ...]:
    """Return the suite of a kind of device, "cuda" or "cpu".

    ratios: the one of `--ratios`, on CUDA. native: of a CPU that multiplies in BF16.
    """
    if device_type == "cuda":
        return GPU_RATIOS if ratios else GPU_SUITE
    return NATIVE_SUITE if native else CPU_SUITE
