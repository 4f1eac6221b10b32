"""Data sources from configurations."""

import torch

from mprun.build.user_data import own_source
from mprun.config import schema
from mprun.data import DigitsImages, DocsText, SyntheticImages, SyntheticTokens
from mprun.data.cifar10 import Cifar10
from mprun.data.image_folder import ImageFolder
from mprun.data.lm1b import Lm1b
from mprun.data.source import Source
from mprun.data.text import Text
from mprun.errors import BadInput


def build_data(config: schema.DataConfig, seed: int, device: torch.device) -> Source:
    """The data source of a configuration."""
    common = {"batch_size": config.batch_size, "seed": seed, "device": device}
    match config:
        case schema.DigitsConfig():
            return DigitsImages(
                config.image_size,
                **common,
                channels=config.channels,
                value_range=config.value_range,
            )
        case schema.DocsTextConfig():
            return DocsText(
                config.level,
                sequence_length=config.sequence_length,
                vocab_limit=config.vocab_limit,
                vocab_multiple=config.vocab_multiple,
                **common,
            )
        case schema.SyntheticImagesConfig():
            return SyntheticImages(
                config.num_classes,
                config.image_size,
                **common,
                channels=config.channels,
                train_size=config.train_size,
                eval_size=config.eval_size,
                value_range=config.value_range,
            )
        case schema.SyntheticTokensConfig():
            return SyntheticTokens(
                config.vocab_size,
                sequence_length=config.sequence_length,
                train_tokens=config.train_tokens,
                eval_tokens=config.eval_tokens,
                **common,
            )
        case schema.ImageFolderConfig():  # imagenet too
            return ImageFolder(
                config.root,
                imagenet=isinstance(config, schema.ImageNetConfig),
                layout=config.layout,
                eval_share=config.eval_share,
                image_size=config.image_size,
                channels=config.channels,
                augmentation=config.augmentation,
                flip=config.flip,
                resize_to=config.resize_to,
                centre_crop=config.centre_crop,
                value_range=config.value_range,
                on_corrupt=config.on_corrupt,
                workers=config.workers,
                prefetch=config.prefetch,
                **common,
            )
        case schema.Cifar10Config():
            return Cifar10(
                config.root,
                image_size=config.image_size,
                augmentation=config.augmentation,
                flip=config.flip,
                value_range=config.value_range,
                train_size=config.train_size,
                eval_size=config.eval_size,
                **common,
            )
        case schema.TextConfig():
            return Text(
                config.root,
                sequence_length=config.sequence_length,
                vocab_limit=config.vocab_limit,
                vocab_multiple=config.vocab_multiple,
                lower=config.lower,
                eval_split=config.eval_split,
                rotate=config.rotate,
                eval_tokens=config.eval_tokens,
                cache=config.cache,
                **common,
            )
        case schema.Lm1bConfig():
            return Lm1b(
                config.root,
                vocabulary=config.vocabulary,
                sequence_length=config.sequence_length,
                vocab_multiple=config.vocab_multiple,
                eval_split=config.eval_split,
                eval_tokens=config.eval_tokens,
                cache=config.cache,
                **common,
            )
        case schema.CustomDataConfig():
            return own_source(config, seed, device)
    raise BadInput(f"data={config.name}: no builder")
