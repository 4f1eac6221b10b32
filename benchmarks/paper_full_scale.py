"""Hours of the full recipes of `mprun paper` on an H200 at its limit: full_scale.json.

    python -m benchmarks.paper_full_scale [RECIPE ...]

They are counted, not measured: the time of a step from `mprun bench --roofline`, times the steps of
the recipe. Without arguments all recipes are counted again.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

from mprun.config.compose import compose_config
from mprun.extensions.bench.roofline import command as roofline
from mprun.extensions.bench.roofline.limits import ceilings_of, limits
from mprun.extensions.paper.rows import ROWS, Full

PATH = Path(__file__).parents[1] / "mprun" / "extensions" / "paper" / "full_scale.json"
GPU, MODES = "H200", "fp32,amp"


def steps_of(full: Full) -> int:
    """Return the steps of the recipe according to its configuration."""
    config = compose_config([f"experiment={full.experiment}"], files=False).config
    if config.train.steps is not None:
        return config.train.steps
    if not full.samples:
        raise ValueError(f"{full.experiment}: counts epochs; rows.yaml needs its samples")
    batch = config.data.batch_size * config.train.accumulate
    batch *= getattr(config.data, "sequence_length", 1)
    return round(config.train.epochs * (full.samples // batch))


def hours_of(full: Full) -> dict[str, float]:
    """Return mode -> hours."""
    options: Namespace = roofline.parse(
        [f"experiment={full.experiment}", "--gpu", GPU, "--mode", MODES]
    )
    steps, refused = roofline.counted_modes(options, ceilings_of(GPU))
    found = limits(steps, ceilings_of(GPU), refused)
    return {
        mode: float(f"{own['step_s'] * steps_of(full) / 3600:.3g}")
        for mode, own in found["modes"].items()
    }


def main(wanted: list[str]) -> None:
    known = json.loads(PATH.read_text(encoding="utf-8"))
    full = {row.full.experiment: row.full for row in ROWS if row.full is not None}
    for name in wanted or full:
        known["hours"][name] = hours_of(full[name])
        print(name, steps_of(full[name]), known["hours"][name])
    known = {
        "what": f"hours on one {GPU} at the limit of mprun bench --roofline, counted",
        "hours": {name: known["hours"][name] for name in full if name in known["hours"]},
    }
    PATH.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
