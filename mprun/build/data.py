"""Data sources from configurations."""

import torch

from mprun.config import schema
from mprun.data import DigitsImages, DocsText, SyntheticImages, SyntheticTokens
from mprun.errors import BadInput


def build_data(config: schema.DataConfig, seed: int, device: torch.device):
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
    raise BadInput(f"data={config.name}: no builder")
