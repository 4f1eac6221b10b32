"""The published recipes: each composes, holds the numbers of its source, and says where from."""

import math
import re
from functools import cache

import pytest

from mprun.build.run import schedule_of
from mprun.config.compose import compose_config, conf_dir
from mprun.errors import BadInput

# The sources' numbers, written down once more and not read from the files.
SGD = {"optim.name": "sgd", "optim.nesterov": False}
IMAGENET = {"data.name": "imagenet", "data.flip": True, "model.num_classes": None}
TOP1 = {"compare.metric": "top1", "compare.margin": 0.5}
CAFFE = {
    **SGD,
    **IMAGENET,
    **TOP1,
    "model.name": "alexnet",
    "model.variant": "2012",
    "model.dropout": 0.5,
    "data.image_size": 227,
    "data.resize_to": 256,
    "data.augmentation": "crop",
    "data.value_range": "mean_subtracted",
    "optim.momentum": 0.9,
    "optim.weight_decay": 5e-4,
    "optim.bias_lr_factor": 2.0,
    "optim.decay_bias": False,
    "train.epochs": None,
}
RESNET = {
    **SGD,
    **IMAGENET,
    **TOP1,
    "model.name": "resnet50",
    "data.batch_size": 256,
    "data.image_size": 224,
    "data.resize_to": 256,
    "data.augmentation": "resized_crop",
    "data.value_range": "standardised",
    "train.epochs": 90,
    "train.steps": None,
    "optim.decay_bias": True,
    "optim.bias_lr_factor": 1.0,
}
TEXT = {
    "model.name": "lstm_lm",
    "model.num_layers": 2,
    "model.projection_size": 0,
    "model.forget_bias": 0.0,
    "data.name": "text",
    "data.batch_size": 20,
    "data.rotate": False,
    "data.eval_split": "valid",
    "optim.name": "sgd",
    "optim.momentum": 0.0,
    "optim.weight_decay": 0.0,
    "train.steps": None,
    "compare.metric": "loss",
    "compare.margin": 0.01,
}
PTB = {
    **TEXT,
    "model.vocab_size": 10_000,
    "model.time_reduction": "sum",
    "optim.lr": 1.0,
    "optim.schedule": "epoch_decay",
}
WIKITEXT2 = {
    **TEXT,
    "model.time_reduction": "mean",
    "data.sequence_length": 35,
    "optim.lr": 20.0,
    "train.clip_norm": 0.25,
}
GAN = {
    "model.name": "dcgan",
    "model.latent_size": 100,
    "model.generator_width": 64,
    "model.discriminator_width": 64,
    "data.batch_size": 128,
    "data.flip": False,
    "data.value_range": "tanh",
    "optim.name": "adam",
    "optim.lr": 2e-4,
    "optim.betas": [0.5, 0.999],
    "optim.weight_decay": 0.0,
    "compare.metric": "sliced_wasserstein",
    "compare.margin": 0.1,
}
FACES = {
    **GAN,
    "data.name": "image_folder",
    "data.layout": "flat",
    "data.augmentation": "centre",
    "data.centre_crop": 178,
}
CIFAR10 = {
    "data.name": "cifar10",
    "data.batch_size": 128,
    "data.augmentation": "padded_crop",
    "data.flip": True,
    "train.epochs": 30,
    "compare.metric": "top1",
    "compare.margin": 1.0,
}


def ptb(size, init, dropout, unroll, constant_epochs, gamma, epochs, clip):
    return {
        **PTB,
        "model.hidden_size": size,
        "model.embedding_size": size,
        "model.init_range": init,
        "model.dropout": dropout,
        "data.sequence_length": unroll,
        "optim.constant_epochs": constant_epochs,
        "optim.gamma": gamma,
        "train.epochs": epochs,
        "train.clip_norm": clip,
    }


RECIPES = {
    "alexnet_imagenet": {
        **CAFFE,
        "data.batch_size": 256,
        "optim.lr": 0.01,
        "train.steps": 450_000,
    },
    "alexnet_imagenet_8gpu": {
        **CAFFE,
        "data.batch_size": 1024,
        "optim.lr": 0.02,
        "optim.schedule": "polynomial",
        "optim.power": 2.0,
        "train.steps": 125_000,
    },
    "resnet50_imagenet": {
        **RESNET,
        "model.label_smoothing": 0.0,
        "optim.lr": 0.1,
        "optim.momentum": 0.9,
        "optim.weight_decay": 1e-4,
        "optim.decay_norm": True,
        "optim.warmup_epochs": 0.0,
    },
    "resnet50_imagenet_v15": {
        **RESNET,
        "model.label_smoothing": 0.1,
        "optim.lr": 0.256,
        "optim.momentum": 0.875,
        "optim.weight_decay": 2.0**-15,
        "optim.decay_norm": False,
        "optim.warmup_epochs": 5.0,
        "optim.schedule": "cosine",
    },
    # Keep probabilities 1, 0.5 and 0.35.
    "lstm_ptb_small": ptb(200, 0.1, 0.0, 20, 4, 0.5, 13, 5.0),
    "lstm_ptb_medium": ptb(650, 0.05, 0.5, 35, 6, 0.8, 39, 5.0),
    "lstm_ptb_large": ptb(1500, 0.04, 0.65, 35, 14, 1 / 1.15, 55, 10.0),
    "lstm_wikitext2": {
        **WIKITEXT2,
        "model.hidden_size": 650,
        "model.embedding_size": 650,
        "model.dropout": 0.5,
        "train.epochs": 40,
    },
    "lstm_wikitext2_small": {
        **WIKITEXT2,
        "model.hidden_size": 200,
        "model.embedding_size": 200,
        "model.dropout": 0.2,
        "optim.schedule": "constant",
        "train.epochs": 6,
    },
    "biglstm_lm1b": {
        "model.hidden_size": 8192,
        "model.num_layers": 2,
        "model.projection_size": 1024,
        "model.embedding_size": 1024,
        "model.dropout": 0.1,  # keep probability 0.9
        "model.sampled_softmax": 8192,
        "model.time_reduction": "sum",
        "model.embedding_gradient_factor": 128.0,
        "data.name": "lm1b",
        "data.batch_size": 128,
        "data.sequence_length": 20,
        "optim.name": "adagrad",
        "optim.lr": 0.2,
        "optim.initial_accumulator": 1.0,
        "optim.schedule": "constant",
        "optim.average_decay": 0.999,
        "optim.average_modules": ["lstm"],
        "train.clip_norm": 1.0,
        "train.clip_modules": ["lstm"],
        "train.accumulate": 1,
        "numerics.keep_failure": False,
        "compare.metric": "loss",
        "compare.margin": 0.01,
    },
    "dcgan_celeba": {**FACES, "data.image_size": 64, "train.epochs": 25},
    "dcgan_celeba_128": {**FACES, "data.image_size": 128, "train.steps": 100_000},
    "alexnet_cifar10": {
        **SGD,
        **CIFAR10,
        "model.variant": "torchvision",
        "data.image_size": 64,
        "optim.lr": 0.01,
        "optim.momentum": 0.9,
        "optim.weight_decay": 5e-4,
        "optim.bias_lr_factor": 1.0,
        "optim.decay_bias": True,
    },
    "resnet50_cifar10": {
        **SGD,
        **CIFAR10,
        "data.image_size": 32,
        "optim.lr": 0.1,
        "optim.momentum": 0.9,
        "optim.weight_decay": 1e-4,
    },
    "dcgan_cifar10": {
        **GAN,
        "data.name": "cifar10",
        "data.image_size": 32,
        "data.augmentation": "none",
        "train.epochs": 25,
    },
}
# Two steps of these run in minutes or less on a CPU, from files that tests have.
SMALL = {
    "alexnet_cifar10": "cifar10_jpeg",
    "resnet50_cifar10": "cifar10_jpeg",
    "dcgan_cifar10": "cifar10_jpeg",
    "lstm_wikitext2_small": "wikitext_2",
    "lstm_wikitext2": "wikitext_2",
}
ROOT = str(conf_dir())  # any folder: composing does not look into it


@cache
def composed(recipe):
    return compose_config([f"experiment={recipe}", f"data.root={ROOT}"]).config


def text(recipe):
    return (conf_dir() / "experiment" / f"{recipe}.yaml").read_text(encoding="utf-8")


def test_the_table_is_complete():
    files = {path.stem for path in (conf_dir() / "experiment").glob("*.yaml")}
    assert {name for name in files if not name.startswith("quickstart_")} == set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_are_those_of_the_source(recipe):
    config = composed(recipe)
    for key, value in RECIPES[recipe].items():
        group, name = key.split(".")
        assert getattr(getattr(config, group), name) == value, key


@pytest.mark.parametrize("recipe", RECIPES)
def test_rhythm(recipe):
    train = composed(recipe).train
    assert (train.steps is None) != (train.epochs is None)
    # Often enough to see a run go wrong, and to lose little when it is interrupted.
    assert 10 <= train.log_every <= 100
    assert 0 < train.eval_every <= 20_000
    assert 0 < train.checkpoint_every <= 10_000


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_file_names_source_expected_result_difference_and_margin(recipe):
    comments = [line for line in text(recipe).splitlines() if line.startswith("#")]
    assert comments[0] == "# @package _global_"
    joined = " ".join(line.lstrip("# ") for line in comments[1:])
    source, rest = joined.split("Source: ")[1].split("Expected FP32 result: ")
    expected, rest = rest.split("Differs from the source: ")
    difference, margin = rest.split("Margin: ")
    assert re.search(r"arXiv \d{4}\.\d{4,5}|\w+/[\w-]+ \S+/", source)
    assert "no published figure" in expected or re.search(r"(top-1|perplexity)\D*\d", expected)
    assert len(difference.split()) > 5
    # The number of the comment is the number of the file.
    config = composed(recipe).compare
    stated = {"top1": "{:g} point", "loss": "{:.0%} of the loss", "sliced_wasserstein": "{:.0%} of"}
    stated = stated[config.metric].format(config.margin).replace("%", " %")
    assert margin.startswith(stated)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_user_gives_the_folder_and_may_shorten(recipe):
    with pytest.raises(BadInput, match=f"data.root=null: data={composed(recipe).data.name} needs"):
        compose_config([f"experiment={recipe}"])
    short = compose_config([f"experiment={recipe}", f"data.root={ROOT}", "train.steps=7"]).config
    assert (short.train.steps, short.train.epochs) == (7, None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_page_has_a_row_for_each(recipe):
    page = (conf_dir().parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{recipe}` |")]
    assert row.split(" | ")[3].split()[0] == f"{composed(recipe).compare.margin:g}"


V15_WARM_UP, V15_STEPS = 5 * 5004, 90 * 5004
# 1,281,167 images give 5,004 full batches of 256, 50,000 images 390 of 128; Penn Treebank's 929,589
# tokens give 2,323 steps of 20 x 20 and 1,327 of 20 x 35; WikiText-2's 2,088,628 give 2,983.
SCHEDULES = [
    (
        "alexnet_imagenet",
        5004,
        450_000,
        {0: 0.01, 99_999: 0.01, 100_000: 1e-3, 199_999: 1e-3, 200_000: 1e-4}
        | {299_999: 1e-4, 300_000: 1e-5, 399_999: 1e-5, 400_000: 1e-6, 449_999: 1e-6},
    ),
    (
        "alexnet_imagenet_8gpu",
        1251,
        125_000,
        # 0.02 * (1 - t)^2 in the source: within its floor of 5e-6 of ours.
        {0: 0.02, 62_500: 5e-6 + (0.02 - 5e-6) / 4, 124_999: 5e-6 + (0.02 - 5e-6) / 125_000**2},
    ),
    (
        "resnet50_imagenet",
        5004,
        90 * 5004,
        {0: 0.1, 30 * 5004 - 1: 0.1, 30 * 5004: 0.01, 60 * 5004 - 1: 0.01, 60 * 5004: 0.001},
    ),
    (
        "resnet50_imagenet_v15",
        5004,
        V15_STEPS,
        {
            0: 0.256 / V15_WARM_UP,
            V15_WARM_UP // 2 - 1: 0.128,
            V15_WARM_UP - 1: 0.256,
            V15_WARM_UP: 0.256,
            (V15_WARM_UP + V15_STEPS) // 2: 0.128,
            V15_WARM_UP + (V15_STEPS - V15_WARM_UP) // 3: 0.192,  # cos(pi / 3) = 1/2
        },
    ),
    ("lstm_ptb_small", 2323, 13 * 2323, {4 * 2323 - 1: 1.0, 4 * 2323: 0.5, 13 * 2323 - 1: 2.0**-9}),
    (
        "lstm_ptb_medium",
        1327,
        39 * 1327,
        {0: 1.0, 6 * 1327 - 1: 1.0, 6 * 1327: 0.8, 7 * 1327: 0.64, 39 * 1327 - 1: 0.8**33},
    ),
    ("lstm_ptb_large", 1327, 55 * 1327, {14 * 1327 - 1: 1.0, 14 * 1327: 1 / 1.15}),
    ("lstm_wikitext2", 2983, 40 * 2983, {6 * 2983 - 1: 20.0, 6 * 2983: 16.0, 7 * 2983: 12.8}),
    ("lstm_wikitext2_small", 2983, 6 * 2983, {0: 20.0, 6 * 2983 - 1: 20.0}),
    ("biglstm_lm1b", 300_000, 3_000_000, {0: 0.2, 2_999_999: 0.2}),
    ("dcgan_celeba", 1551, 25 * 1551, {0: 2e-4, 25 * 1551 - 1: 2e-4}),
    ("dcgan_celeba_128", 1551, 100_000, {0: 2e-4, 99_999: 2e-4}),
    ("alexnet_cifar10", 390, 11_700, {0: 0.01, 5850: 0.005, 3900: 0.0075}),
    (
        "resnet50_cifar10",
        390,
        11_700,
        {0: 0.1 / 390, 389: 0.1, 5849: 0.1, 5850: 0.01, 8774: 0.01, 8775: 0.001},
    ),
    ("dcgan_cifar10", 390, 25 * 390, {0: 2e-4, 25 * 390 - 1: 2e-4}),
]


@pytest.mark.parametrize(
    ("recipe", "steps_per_epoch", "steps", "table"), SCHEDULES, ids=[row[0] for row in SCHEDULES]
)
def test_rates_at_named_updates(recipe, steps_per_epoch, steps, table):
    config = composed(recipe)
    if config.train.steps is None:
        assert steps == config.train.epochs * steps_per_epoch
    else:
        assert steps == config.train.steps
    rates = schedule_of(config.optim, steps, steps_per_epoch)
    assert len(rates) == steps
    # FP64, a handful of operations and one power.
    assert {update: rates[update] for update in table} == pytest.approx(table, rel=1e-12)


def test_every_recipe_has_its_schedule_tested():
    assert {row[0] for row in SCHEDULES} == set(RECIPES)


def test_the_cap_of_a_step_is_zaremba_s_in_both_forms():
    """Rate times clipping norm: 20 * 0.25 on the mean over tokens, 1 * 5 on the sum over time."""
    caps = [
        composed(name).optim.lr * composed(name).train.clip_norm
        for name in ("lstm_wikitext2", "lstm_ptb_medium")
    ]
    assert caps == [5.0, 5.0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SMALL)
@pytest.mark.parametrize("precision", ["fp32", "fp16_master_scaled"])
def test_a_small_recipe_trains_on_real_data(
    recipe, precision, build_run, request, monkeypatch, tmp_path_factory
):
    root = request.getfixturevalue(SMALL[recipe])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    built = build_run(
        f"experiment={recipe}",
        f"data.root={root}",
        f"precision={precision}",
        "train.steps=2",
        "data.eval_size=256" if "cifar10" in recipe else "data.eval_tokens=700",
    )
    epoch = {row[0]: row[1] for row in SCHEDULES}[recipe]
    assert built.task.steps_per_epoch == epoch
    for step in range(2):
        assert math.isfinite(built.task.train_step(step)["loss"].item())
