"""The published recipes in time: rates at named updates, and first steps on real data."""

import math

import pytest

from mprun.assembly.run import schedule_of

from ..tables import with_extensions
from .test_recipes import RECIPES, composed

# Two steps of these run in minutes or less on a CPU, from files that tests have.
SMALL = dict.fromkeys(("alexnet_cifar10", "resnet50_cifar10", "dcgan_cifar10"), "cifar10_jpeg")
SMALL |= dict.fromkeys(("lstm_wikitext2_small", "lstm_wikitext2"), "wikitext_2")
# Update -> rate.
ALEXNET = {0: 0.01, 99_999: 0.01, 100_000: 1e-3, 199_999: 1e-3, 200_000: 1e-4, 299_999: 1e-4}
ALEXNET |= {300_000: 1e-5, 399_999: 1e-5, 400_000: 1e-6, 449_999: 1e-6}
# 0.02 * (1 - t)^2 in the source: within its floor of 5e-6 of ours.
SQUARED = {t: 5e-6 + (0.02 - 5e-6) * (1 - t / 125_000) ** 2 for t in (0, 62_500, 124_999)}
RESNET = {0: 0.1, 30 * 5004 - 1: 0.1, 30 * 5004: 0.01, 60 * 5004 - 1: 0.01, 60 * 5004: 0.001}
WARM_UP, STEPS = 5 * 5004, 90 * 5004
V15 = {0: 0.256 / WARM_UP, WARM_UP // 2 - 1: 0.128, WARM_UP - 1: 0.256, WARM_UP: 0.256}
# Half-way down the cosine, and where cos(pi / 3) = 1/2.
V15 |= {(WARM_UP + STEPS) // 2: 0.128, WARM_UP + (STEPS - WARM_UP) // 3: 0.192}
VGG = {0: 0.01, 92_499: 0.01, 92_500: 1e-3, 185_000: 1e-4, 277_499: 1e-4, 277_500: 1e-5}
ROOT = {0: 0.01, 1_200_000: 0.01 * 0.5**0.5}  # 0.01 * (1 - t)^0.5
V2 = {0: 0.045, 20_017: 0.045, 20_018: 0.045 * 0.8801, 40_036: 0.045 * 0.8801**2}
V3 = {0: 0.045, 1599: 0.045, 1600: 0.0423, 3200: 0.045 * 0.94**2, 79_999: 0.045 * 0.94**49}
MEDIUM = {0: 1.0, 6 * 1327 - 1: 1.0, 6 * 1327: 0.8, 7 * 1327: 0.64, 39 * 1327 - 1: 0.8**33}
# The cosine is half-way down between its ends.
GPT2 = {0: 6e-4 / 2000, 1999: 6e-4, 2000: 6e-4, 301_000: (6e-4 + 6e-5) / 2}
CHARS = {0: 1e-5, 99: 1e-3, 100: 1e-3, 1050: (1e-3 + 1e-4) / 2}
RESNET_32 = {0: 0.1 / 390, 389: 0.1, 5849: 0.1, 5850: 0.01, 8774: 0.01, 8775: 0.001}
# Recipe, steps of an epoch, steps, rates. 1,281,167 images give 5,004 full batches of 256 and 800
# of 50 x 32, 50,000 images 390 of 128; Penn Treebank's 929,589 tokens give 2,323 steps of 20 x 20
# and 1,327 of 20 x 35; WikiText-2's 2,088,628 give 2,983; OpenWebText's 9,035,582,198 735,317
# batches of 12 x 1024, 40 an update; Shakespeare's 1,003,854 1,307 of 12 x 64.
SCHEDULES = [
    ("alexnet_imagenet", 5004, 450_000, ALEXNET),
    ("alexnet_imagenet_8gpu", 1251, 125_000, SQUARED),
    ("resnet50_imagenet", 5004, STEPS, RESNET),
    ("resnet50_imagenet_v15", 5004, STEPS, V15),
    ("resnet50_preact_imagenet", 5004, STEPS, RESNET),
    ("vgg16_imagenet", 5004, 370_000, VGG),
    ("googlenet_imagenet", 40_036, 2_400_000, ROOT),
    ("inception_v2_imagenet", 20_018, 1_200_000, V2),
    ("inception_v3_imagenet", 800, 80_000, V3),
    ("lstm_ptb_small", 2323, 13 * 2323, {4 * 2323 - 1: 1.0, 4 * 2323: 0.5, 13 * 2323 - 1: 2.0**-9}),
    ("lstm_ptb_medium", 1327, 39 * 1327, MEDIUM),
    ("lstm_ptb_large", 1327, 55 * 1327, {14 * 1327 - 1: 1.0, 14 * 1327: 1 / 1.15}),
    ("lstm_wikitext2", 2983, 40 * 2983, {6 * 2983 - 1: 20.0, 6 * 2983: 16.0, 7 * 2983: 12.8}),
    ("lstm_wikitext2_small", 2983, 6 * 2983, {0: 20.0, 6 * 2983 - 1: 20.0}),
    ("biglstm_lm1b", 39_062, 50 * 39_062, {0: 0.2, 50 * 39_062 - 1: 0.2}),
    ("gpt2_openwebtext", 18_382, 600_000, GPT2),
    ("gpt2_fineweb", 18_865, 18_865, {0: 6e-4 / 700, 699: 6e-4, 700: 6e-4}),
    ("olmoe_130b", 30_993, 30_993, {0: 4e-4 / 2000, 1999: 4e-4, 2000: 4e-4}),
    ("gpt_shakespeare_char", 1307, 2000, CHARS),
    ("dcgan_celeba", 1551, 25 * 1551, {0: 2e-4, 25 * 1551 - 1: 2e-4}),
    ("dcgan_celeba_128", 1551, 100_000, {0: 2e-4, 99_999: 2e-4}),
    ("alexnet_cifar10", 390, 11_700, {0: 0.01, 5850: 0.005, 3900: 0.0075}),
    ("resnet50_cifar10", 390, 11_700, RESNET_32),
    ("dcgan_cifar10", 390, 25 * 390, {0: 2e-4, 25 * 390 - 1: 2e-4}),
]
SCHEDULES = with_extensions("SCHEDULES", SCHEDULES)


@pytest.mark.slow
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


def test_every_recipe_is_in_the_table():
    assert {row[0] for row in SCHEDULES} == set(RECIPES)


def test_the_cap_of_a_step_is_zaremba_s_in_both_forms():
    """Rate times clipping norm: 20 * 0.25 on the mean over tokens, 1 * 5 on the sum over time."""
    for config in map(composed, ("lstm_wikitext2", "lstm_ptb_medium")):
        assert config.optim.lr * config.train.clip_norm == 5.0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SMALL)
@pytest.mark.parametrize("precision", ["fp32", "fp16_master_scaled"])
def test_a_small_recipe_trains_on_real_data(
    recipe, precision, build_run, request, monkeypatch, tmp_path_factory
):
    root = request.getfixturevalue(SMALL[recipe])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    few = "data.eval_size=256" if "cifar10" in recipe else "data.eval_tokens=700"
    words = [f"experiment={recipe}", f"precision={precision}", f"data.root={root}", few]
    built = build_run(*words, "train.steps=2")
    epoch = {row[0]: row[1] for row in SCHEDULES}[recipe]
    assert built.task.steps_per_epoch == epoch
    for step in range(2):
        assert math.isfinite(built.task.train_step(step)["loss"].item())
