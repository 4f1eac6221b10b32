"""The cost of a step of the small transformer on this CPU in today's formats, as ratios.

    python -m benchmarks.formats_cost [--rounds 60]

All contenders of a comparison take a step in turn, so that a slow spell of the machine hits each of
them. A ratio is the median over rounds, the range its middle half. It uses one thread, whose
CPU time counts: waiting for other processes is no cost of a format.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from mprun.build import build
from mprun.config.compose import compose_config
from mprun.precision import pin_math_flags
from mprun.record.console import markdown_table

# FP8 beside FP32 weights: its cost without the emulation of BF16 around it.
FP8 = ("precision.param_dtype=fp32",)
BLOCKS = ("fp8_delayed", "fp8_block", "mxfp8", "mxfp8_floor", "mxfp8_hybrid", "mxfp4",
          "nvfp4_plain", "nvfp4")  # fmt: skip
COMPARISONS = {
    "width 128, FP8 over FP32": (
        ("model=gpt",),
        {"fp32": (), "fp8_tensorwise": FP8, "fp8_rowwise": FP8, "fp8_unscaled": FP8},
    ),
    "width 512, 128 tokens, FP8 over FP32": (
        ("model=gpt", "model.hidden_size=512", "data.sequence_length=128", "data.batch_size=8"),
        {"fp32": ()} | dict.fromkeys(("fp8_tensorwise", "fp8_rowwise", *BLOCKS), FP8),
    ),
    "width 128, BF16 over BF16 with masters": (
        ("model=gpt",),
        {"bf16_master": (), "bf16_stochastic": (), "bf16_kahan": (), "fp8_tensorwise": ()},
    ),
    "LSTM of the lost updates, over BF16 with masters": (
        ("experiment=quickstart_lost_updates",),
        {"bf16_master": (), "bf16_stochastic": (), "bf16_kahan": ()},
    ),
}


def steps_of(common: Sequence[str], mode: str, more: Sequence[str]):
    """Return a function that takes the next step of a run in this mode."""
    words = [*common, f"precision={mode}", *more, "device=cpu", "threads=1"]
    config = compose_config(words).config
    pin_math_flags(config.precision.fp32_math)
    torch.manual_seed(0)
    task = build(config, torch.device("cpu")).task
    numbers = iter(range(10**9))
    return lambda: task.train_step(next(numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, (common, contenders) in COMPARISONS.items():
        steps = {mode: steps_of(common, mode, more) for mode, more in contenders.items()}
        times: dict[str, list[float]] = {mode: [] for mode in steps}
        for turn in range(given.rounds + 2):
            for mode, step in steps.items():
                started = time.process_time()
                for _ in range(3):
                    step()
                if turn >= 2:
                    times[mode].append((time.process_time() - started) / 3)
        first, *_ = times.values()
        rows = []
        for mode, own in times.items():
            ratios = [a / b for a, b in zip(own, first, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            rows.append([mode, f"{1e3 * statistics.median(own):.1f}", f"{middle:.2f}",
                         f"{low:.2f} to {high:.2f}"])  # fmt: skip
        print(f"\n{name} (`{' '.join(common)}`)\n")
        print(markdown_table(["mode", "ms a step", "ratio", "middle half"], rows))


if __name__ == "__main__":
    main()
