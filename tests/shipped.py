"""The precision modes and loss scalers that mprun ships, as their files say them."""

from typing import Any

import yaml

from mprun.config.option_files import modes, option_files
from mprun.precision import DynamicLossScale, DynamicRule, get_policy

ALL_MODES = list(modes())
# Those in blocks differ from one another in formats alone: tests/precision/test_block_formats.py.
IN_BLOCKS = [m for m in ALL_MODES if (own := get_policy(m).matmul) and own.decoded]
# Those of attention, which few networks have: tests/precision/test_scaled_attention.py.
OF_ATTENTION = [mode for mode in ALL_MODES if get_policy(mode).attention]
MODES = [mode for mode in ALL_MODES if mode not in (*IN_BLOCKS, *OF_ATTENTION)]
# FP8 takes a linear layer that is not the output, which not every network has.
OF_ANY_NETWORK = [mode for mode in MODES if get_policy(mode).matmul is None]


def scaler_file(name: str) -> dict[str, Any]:
    """The values of a scaler's file, without what only names it."""
    content = yaml.safe_load(option_files("scaler")[name].read_text(encoding="utf-8"))
    return {key: value for key, value in content.items() if key not in ("name", "kind")}


# Rules of other projects; what these kinds leave out is torch's.
_OWN = ("none", "static", "dynamic", "logmax")
PUBLISHED = {name: scaler_file(name) for name in option_files("scaler") if name not in _OWN}


def published_scale(name: str, device: str = "cpu", **overrides: Any) -> DynamicLossScale:
    """The loss scale of a published rule, with single arguments replaced."""
    return DynamicLossScale(DynamicRule(**(PUBLISHED[name] | overrides)), device=device)
