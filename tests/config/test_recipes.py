"""The published recipes: each composes, holds the numbers of its source, and says where from."""

import re
from functools import cache

import pytest
import yaml

from mprun.config.compose import compose_config
from mprun.config.option_files import conf_dir, option_files
from mprun.errors import BadInput

from ..tables import with_extensions

# The sources' numbers as one would type them: written down once more, not read from the files.
SGD = """
optim.name=sgd optim.nesterov=false"""
IMAGENET = """
data.name=imagenet data.flip=true model.num_classes=null"""
TOP1 = """
compare.metric=top1 compare.margin=0.5"""
CAFFE = f"""{SGD} {IMAGENET} {TOP1}
model.name=alexnet model.variant='2012' model.dropout=0.5 data.image_size=227 data.resize_to=256
data.augmentation=crop data.value_range=mean_subtracted optim.momentum=0.9 optim.weight_decay=0.0005
optim.bias_lr_factor=2.0 optim.decay_bias=false train.epochs=null"""
RESNET = f"""{SGD} {IMAGENET} {TOP1}
model.name=resnet50 data.batch_size=256 data.image_size=224 data.resize_to=256
data.augmentation=resized_crop data.value_range=standardised train.epochs=90 train.steps=null
optim.decay_bias=true optim.bias_lr_factor=1.0"""
TEXT = """
model.name=lstm_lm model.num_layers=2 model.projection_size=0 model.forget_bias=0.0 data.name=text
data.batch_size=20 data.rotate=false data.eval_split=valid optim.name=sgd optim.momentum=0.0
optim.weight_decay=0.0 train.steps=null compare.metric=loss compare.margin=0.01"""
PTB = f"""{TEXT}
model.vocab_size=10000 model.time_reduction=sum optim.lr=1.0 optim.schedule=epoch_decay"""
WIKITEXT2 = f"""{TEXT}
model.time_reduction=mean data.sequence_length=35 optim.lr=20.0 train.clip_norm=0.25"""
GPT = """
model.name=gpt model.norm=layer model.positions=learned model.mlp=gelu model.qk_norm=false
model.kv_heads=null model.attention=fused model.time_reduction=mean data.name=token_files
optim.name=adamw optim.weight_decay=0.1 optim.decay_bias=false optim.decay_norm=false
optim.eps=1.0e-8 optim.schedule=cosine train.clip_norm=1.0
compare.metric=loss compare.margin=0.0025"""
GPT2 = f"""{GPT}
model.hidden_size=768 model.num_layers=12 model.num_heads=12 model.context_length=1024
data.sequence_length=1024 data.vocab_size=50257 data.vocab_multiple=64 optim.lr=0.0006
optim.betas=[0.9,0.95]"""
GAN = """
model.name=dcgan model.latent_size=100 model.generator_width=64 model.discriminator_width=64
data.batch_size=128 data.flip=false data.value_range=tanh optim.name=adam optim.lr=0.0002
optim.betas=[0.5,0.999] optim.weight_decay=0.0
compare.metric=sliced_wasserstein compare.margin=0.1"""
FACES = f"""{GAN}
data.name=image_folder data.layout=flat data.augmentation=centre data.centre_crop=178"""
CIFAR10 = """
data.name=cifar10 data.batch_size=128 data.augmentation=padded_crop data.flip=true train.epochs=30
compare.metric=top1 compare.margin=1.0"""
RECIPES = {
    "alexnet_imagenet": f"{CAFFE} data.batch_size=256 optim.lr=0.01 train.steps=450000",
    "alexnet_imagenet_8gpu": f"""{CAFFE} data.batch_size=1024 optim.lr=0.02
        optim.schedule=polynomial optim.power=2.0 train.steps=125000""",
    "resnet50_imagenet": f"""{RESNET} model.label_smoothing=0.0 optim.lr=0.1 optim.momentum=0.9
        optim.weight_decay=0.0001 optim.decay_norm=true optim.warmup_epochs=0.0""",
    "resnet50_imagenet_v15": f"""{RESNET} model.label_smoothing=0.1 optim.lr=0.256
        optim.momentum=0.875 optim.weight_decay={2.0**-15} optim.decay_norm=false
        optim.warmup_epochs=5.0 optim.schedule=cosine""",
    "resnet50_preact_imagenet": f"""{RESNET} model.variant=preactivation model.width=1.0
        model.label_smoothing=0.0 optim.lr=0.1 optim.momentum=0.9 optim.weight_decay=0.0001
        optim.decay_norm=true optim.warmup_epochs=0.0""",
    "vgg16_imagenet": f"""{SGD} {IMAGENET} {TOP1} model.name=vgg16 model.dropout=0.5
        model.width=1.0 data.batch_size=256 data.image_size=224 data.resize_to=256
        data.augmentation=crop optim.lr=0.01 optim.momentum=0.9 optim.weight_decay=0.0005
        train.steps=370000""",
    "googlenet_imagenet": f"""{SGD} {IMAGENET} {TOP1} model.name=googlenet model.dropout=0.4
        model.aux_weight=0.3 model.width=1.0 data.batch_size=32 data.image_size=224
        data.resize_to=256 data.augmentation=crop data.value_range=mean_subtracted optim.lr=0.01
        optim.momentum=0.9 optim.weight_decay=0.0002 optim.bias_lr_factor=2.0
        optim.decay_bias=false optim.schedule=polynomial optim.power=0.5 train.steps=2400000""",
    "inception_v2_imagenet": f"""{SGD} {IMAGENET} {TOP1} model.name=inception_v2 model.width=1.0
        data.batch_size=64 data.image_size=224 optim.lr=0.045 optim.momentum=0.9
        optim.weight_decay=0.0002 optim.decay_norm=false train.steps=1200000""",
    "inception_v3_imagenet": f"""{IMAGENET} {TOP1} model.name=inception_v3 model.dropout=0.5
        model.aux_weight=0.4 model.width=1.0 model.label_smoothing=0.1 data.batch_size=32
        data.image_size=299 optim.name=rmsprop_tensorflow optim.alpha=0.9 optim.eps=1.0
        optim.momentum=0.9 optim.initial_accumulator=1.0 optim.lr=0.045 optim.weight_decay=0.00004
        optim.decay_bias=false optim.decay_norm=false optim.average_decay=0.9999
        optim.schedule=step optim.gamma=0.94 train.clip_norm=2.0 train.epochs=100
        train.accumulate=50""",
    # Keep probabilities 1, 0.5 and 0.35.
    "lstm_ptb_small": f"""{PTB} model.hidden_size=200 model.embedding_size=200 model.init_range=0.1
        model.dropout=0.0 data.sequence_length=20 optim.constant_epochs=4 optim.gamma=0.5
        train.epochs=13 train.clip_norm=5.0""",
    "lstm_ptb_medium": f"""{PTB} model.hidden_size=650 model.embedding_size=650
        model.init_range=0.05 model.dropout=0.5 data.sequence_length=35 optim.constant_epochs=6
        optim.gamma=0.8 train.epochs=39 train.clip_norm=5.0""",
    "lstm_ptb_large": f"""{PTB} model.hidden_size=1500 model.embedding_size=1500
        model.init_range=0.04 model.dropout=0.65 data.sequence_length=35 optim.constant_epochs=14
        optim.gamma={1 / 1.15} train.epochs=55 train.clip_norm=10.0""",
    "lstm_wikitext2": f"""{WIKITEXT2} model.hidden_size=650 model.embedding_size=650
        model.dropout=0.5 train.epochs=40""",
    "lstm_wikitext2_small": f"""{WIKITEXT2} model.hidden_size=200 model.embedding_size=200
        model.dropout=0.2 optim.schedule=constant train.epochs=6""",
    # Keep probability 0.9.
    "biglstm_lm1b": f"""model.hidden_size=8192 model.num_layers=2 model.projection_size=1024
        model.embedding_size=1024 model.dropout=0.1 model.sampled_softmax=8192
        model.time_reduction=sum model.embedding_gradient_factor={256 * 4}
        model.output_gradient_factor=4 data.name=lm1b data.batch_size=256 data.sequence_length=20
        optim.name=adagrad optim.lr=0.2 optim.initial_accumulator=1.0 optim.schedule=constant
        optim.average_decay=0.999 optim.average_modules=[lstm] train.clip_norm=1.0
        train.clip_modules=[lstm] train.accumulate=4 train.epochs=50 numerics.keep_failure=false
        compare.metric=loss compare.margin=0.01""",
    "gpt2_openwebtext": f"""{GPT2} model.bias=false data.batch_size=12 optim.warmup_updates=2000
        optim.final_factor=0.1 train.accumulate={5 * 8} train.steps=600000""",
    "gpt2_fineweb": f"""{GPT2} model.bias=true data.batch_size=64
        data.eval_tokens={20 * 64 * 1024 * 8} optim.warmup_updates=700 optim.final_factor=0.0
        train.accumulate={524_288 // (64 * 1024)} train.steps=18865""",
    "gpt_shakespeare_char": f"""{GPT} model.hidden_size=128 model.num_layers=4 model.num_heads=4
        data.batch_size=12 data.sequence_length=64 data.vocab_size=65 optim.lr=0.001
        optim.betas=[0.9,0.99] optim.warmup_updates=100 optim.final_factor=0.1 train.accumulate=1
        train.steps=2000""",
    "olmoe_130b": """model.name=gpt_moe model.hidden_size=2048 model.num_layers=16
        model.num_heads=16 model.norm=rms model.positions=rotary model.kv_heads=null
        model.qk_norm=false model.bias=false model.num_experts=64 model.top_k=8
        model.expert_size=1024 model.balancing=auxiliary model.balance_factor=0.01
        model.capacity=null model.renormalise=false model.shared_size=0 data.name=token_files
        data.sequence_length=4096 data.vocab_size=50280 optim.name=adamw optim.lr=0.0004
        optim.eps=1.0e-8 optim.weight_decay=0.1 optim.betas=[0.9,0.95] optim.decay_bias=true
        optim.decay_norm=true optim.schedule=cosine optim.final_factor=0.1
        optim.warmup_updates=2000 train.steps=30993 train.clip_norm=1.0 data.batch_size=8
        train.accumulate=128 compare.metric=loss compare.margin=0.0025""",
    "dcgan_celeba": f"{FACES} data.image_size=64 train.epochs=25",
    "dcgan_celeba_128": f"{FACES} data.image_size=128 train.steps=100000",
    "alexnet_cifar10": f"""{SGD} {CIFAR10} model.variant=torchvision data.image_size=64
        optim.lr=0.01 optim.momentum=0.9 optim.weight_decay=0.0005 optim.bias_lr_factor=1.0
        optim.decay_bias=true""",
    "resnet50_cifar10": f"""{SGD} {CIFAR10} data.image_size=32 optim.lr=0.1 optim.momentum=0.9
        optim.weight_decay=0.0001""",
    "dcgan_cifar10": f"""{GAN} data.name=cifar10 data.image_size=32 data.augmentation=none
        train.epochs=25""",
}
RECIPES = with_extensions("RECIPES", RECIPES)
ROOT = str(conf_dir())  # any folder: composing does not look into it


@cache
def composed(recipe):
    return compose_config([f"experiment={recipe}", f"data.root={ROOT}"]).config


def text(recipe):
    return option_files("experiment")[recipe].read_text(encoding="utf-8")


def test_the_table_is_complete():
    others = ("quickstart_", "minutes_", "ranks_", "paper_")
    assert {name for name in option_files("experiment") if not name.startswith(others)} == {
        *RECIPES
    }


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.few(3)
def test_values_are_those_of_the_source(recipe):
    config = composed(recipe)
    for text in RECIPES[recipe].split():
        key, _, value = text.partition("=")
        group, name = key.split(".")
        assert getattr(getattr(config, group), name) == yaml.safe_load(value), text


@pytest.mark.few(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_rhythm(recipe):
    train = composed(recipe).train
    assert (train.steps is None) != (train.epochs is None)
    # Often enough to see a run go wrong, and to lose little when it is interrupted.
    assert 10 <= train.log_every <= 100
    assert 0 < train.eval_every <= 20_000
    assert 0 < train.checkpoint_every <= 10_000


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.few(6)
def test_the_file_names_source_expected_result_difference_and_margin(recipe):
    comments = [line for line in text(recipe).splitlines() if line.startswith("#")]
    assert comments[0] == "# @package _global_"
    # The help page prints the second line, behind 28 characters.
    assert comments[1].endswith(".") and len(comments[1]) <= 74
    joined = " ".join(line.lstrip("# ") for line in comments[1:])
    source, rest = joined.split("Source: ")[1].split("Expected FP32 result: ")
    expected, rest = rest.split("Differs from the source: ")
    difference, margin = rest.split("Margin: ")
    assert re.search(r"arXiv \d{4}\.\d{4,5}|\w+/[\w.-]+ \S+/", source)
    assert "no published figure" in expected or re.search(
        r"(top-1|perplexity|error rate|mAP|loss)\D*\d", expected
    )
    assert len(difference.split()) > 5
    # The number of the comment is the number of the file.
    config = composed(recipe).compare
    stated = dict.fromkeys(("top1", "cer", "map"), f"{config.margin:g} point")
    stated |= {"loss": f"{100 * config.margin:.3g} % of the loss"}
    stated |= {"sliced_wasserstein": f"{100 * config.margin:.0f} % of"}
    assert margin.startswith(stated[config.metric])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.few(2)
def test_the_user_gives_the_folder_and_may_shorten(recipe):
    with pytest.raises(BadInput, match=f"data.root=null: data={composed(recipe).data.name} needs"):
        compose_config([f"experiment={recipe}"])
    short = compose_config([f"experiment={recipe}", f"data.root={ROOT}", "train.steps=7"]).config
    assert (short.train.steps, short.train.epochs) == (7, None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_page_has_a_row_for_each(recipe):
    page = (conf_dir().parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    row, *_ = [line for line in page.splitlines() if line.startswith(f"| `{recipe}` |")]
    assert row.split(" | ")[3].split()[0] == f"{composed(recipe).compare.margin:g}"
