"""Published dynamic loss-scaling rules as arguments of `DynamicLossScale`.

Constants and rules were read in each project's source, named at its entry; bit for bit the same
scale inside [min_scale, max_scale]. Three things differ on purpose:

- Where the original has no floor or ceiling, the bound is 2**-126 or 2**126: the widest range in
  which scale and reciprocal are normal FP32 numbers.
- Where the original raises at the floor (deepspeed, fairseq), `max_consecutive_skips=1` makes
  `collapsed()` true on the very step on which the original raises.
- Where it stays at the floor or falls for ever (the others), 50 skips in a row end the run.

"Growth every N iterations since the last overflow" (apex_fp16, fairseq, openseq2seq) is the same
rule as N clean steps since the last overflow or growth, and is written so here.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from mprun.precision.loss_scale import LARGEST_SCALE, SMALLEST_SCALE, DynamicLossScale


def _preset(**arguments: Any) -> MappingProxyType[str, Any]:
    defaults = {
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "hysteresis": 1,
        "min_scale": SMALLEST_SCALE,
        "max_scale": LARGEST_SCALE,
        "max_consecutive_skips": 50,
        "growth_delay": 0,
        "refill_on_clean_step": False,
        "tolerance": 0.0,
        "hold_at_floor": False,
    }
    return MappingProxyType(defaults | arguments)


PRESETS: MappingProxyType[str, MappingProxyType[str, Any]] = MappingProxyType(
    {
        # torch/amp/grad_scaler.py, ATen/native/cpu/AmpGradScalerKernels.cpp. No floor; growth that
        # would leave FP32 is not done.
        "torch": _preset(init_scale=2.0**16, growth_interval=2000),
        # NVIDIA/apex, apex/amp/scaler.py. Ceiling 2**24, floor only if the user gives one.
        "apex": _preset(init_scale=2.0**16, growth_interval=2000, max_scale=2.0**24),
        # NVIDIA/apex, apex/fp16_utils/loss_scaler.py, DynamicLossScaler. Floor 1.
        "apex_fp16": _preset(init_scale=2.0**32, growth_interval=1000, min_scale=1.0),
        # deepspeedai/DeepSpeed, runtime/fp16/loss_scaler.py with the defaults of its JSON config.
        # Its clean-step count starts at 0 on the step after an overflow: one step later than all
        # others. The credit refills on growth (`consecutive_hysteresis` false).
        "deepspeed": _preset(
            init_scale=2.0**16,
            growth_interval=1000,
            growth_delay=1,
            hysteresis=2,
            min_scale=1.0,
            max_consecutive_skips=1,
        ),
        # NVIDIA/Megatron-LM, core/optimizer/grad_scaler.py, constants from its arguments. Though
        # described as consecutive, overflows far apart add up: only growth refills the credit.
        "megatron": _preset(init_scale=2.0**32, growth_interval=1000, hysteresis=2, min_scale=1.0),
        # facebookresearch/fairseq, optim/dynamic_loss_scaler.py, constants of its command line. The
        # interval there is 2**14 / (data-parallel size * update_freq): given for one process.
        "fairseq": _preset(
            init_scale=2.0**7,
            growth_interval=2**14,
            min_scale=1e-4,
            hold_at_floor=True,
            max_consecutive_skips=1,
        ),
        # keras-team/keras, optimizers/loss_scale_optimizer.py. Neither floor nor ceiling.
        "keras": _preset(init_scale=2.0**15, growth_interval=2000),
        # NVIDIA/OpenSeq2Seq, optimizers/automatic_loss_scaler.py, BackoffScaler. Starts at its
        # ceiling: 2**14 in the last version, 2**24 in earlier ones.
        "openseq2seq": _preset(
            init_scale=2.0**14, growth_interval=2000, min_scale=1.0, max_scale=2.0**14
        ),
    }
)


def build_preset(
    name: str, device: torch.device | str = "cpu", **overrides: Any
) -> DynamicLossScale:
    """The scale of `PRESETS[name]` with single arguments replaced.

    Raises ValueError for an unknown name, and as `DynamicLossScale` for a bad value.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r}: one of {', '.join(sorted(PRESETS))} is allowed")
    return DynamicLossScale(**(dict(PRESETS[name]) | overrides), device=device)
