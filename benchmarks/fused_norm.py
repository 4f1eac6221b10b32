"""BatchNorm with ReLU and the residual sum as one kernel each way: what is known of it.

    python benchmarks/fused_norm.py --out OUT                      # without a GPU: OUT.json, OUT.md
    python benchmarks/fused_norm.py --device cuda --json RECORD    # on one

Without a GPU: numbers that differ from separate operations in Triton's interpreter; the kernels
compiled ahead of time, and their instructions; bytes that a step of ResNet-50 moves, by formula;
launches, memory and host time of its step on the fake CUDA device (`mprun bench --host`), which
runs no kernel. On a GPU: numbers that differ there, and times of the layers of ResNet-50.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from mprun.extensions.fused_norm.modules import pairs_of  # noqa: E402
from mprun.models.classifiers import resnet50  # noqa: E402
from mprun.precision import get_policy  # noqa: E402
from mprun.record.console import markdown_table  # noqa: E402

MODES = ("fp32", "amp", "fp16_master_scaled")
CASE = "model=resnet50 data=synthetic_images data.image_size=224 data.batch_size=256".split()
TURNS = 2  # of the host's times, of which the least counts: the machine has other work, too
# Reads and writes of a map: forward, and backward.
#   BatchNorm  statistics, then values to values; the same with two operands
#   ReLU       one to one; gradient and output to gradient
#   sum        two to one; its gradient is passed on
#   fused      as BatchNorm, the mask computed anew; with a sum its backward pass reads the output,
#              too, and writes the residual's gradient, which its second kernel reads
PASSES = {"norm": (3, 5), "relu": (2, 3), "sum": (3, 0), "fused": (3, 5), "fused, sum": (4, 7)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="with --device cuda: write the record there")
    options = parser.parse_args()
    if options.device == "cuda":
        found = on_a_gpu(torch.device("cuda"))
        text = json.dumps(found, indent=1)
        if options.json is not None:
            options.json.write_text(text + "\n", encoding="utf-8")
        print(text)
        return 0 if all(own["why_not"] is None for own in found["modes"].values()) else 1
    found = {"interpreter": interpreted(), "compiled": compiled(), "bytes": moved(2)}
    found["host"] = least([{value: hosted(value) for value in ("off", "on")} for _ in range(TURNS)])
    if options.out is not None:
        text = json.dumps(found, indent=1) + "\n"
        options.out.with_suffix(".json").write_text(text, encoding="utf-8")
        options.out.with_suffix(".md").write_text(page(found), encoding="utf-8")
    print(page(found))
    return 1 if any(found["interpreter"]["different"].values()) else 0


def on_a_gpu(device: torch.device) -> dict:
    """Compare and time the kernels of every mode's dtypes."""
    from mprun.extensions.fused_norm import choice

    with torch.device("meta"):
        layers = pairs_of(resnet50())
    found: dict = {"device": torch.cuda.get_device_name(device), "modes": {}}
    for mode in (*MODES, "fp16_naive", "amp_bf16"):
        policy = get_policy(mode)
        why_not = choice.why_not_on(device, policy)
        own = {"why_not": why_not, "faster": None, "times": None}
        if why_not is None:
            own["faster"], own["times"] = choice.choose(layers, policy, device)
        found["modes"][mode] = own
    return found


def interpreted() -> dict:
    script = ROOT / "tests" / "extensions" / "fused_norm" / "norms_in_interpreter.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    failed = {label: text for label, text in found.pop("outcomes").items() if text is not None}
    return found | {"failed": failed}


def compiled() -> dict:
    from tests.extensions.fused_norm.norms_compiled import TARGETS, outcomes

    return {f"sm_{capability}": outcomes(capability) for capability in TARGETS}


def moved(itemsize: int) -> dict:
    """Return bytes of an image of 224 px that norms, ReLUs and sums of ResNet-50 read and write."""
    with torch.device("meta"):
        network = resnet50().to(memory_format=torch.channels_last)
        sizes: dict[nn.Module, int] = {}
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_hook(
                    lambda own, _, found: sizes.update({own: found.numel() * itemsize})
                )
        network(torch.empty(1, 3, 224, 224))
    known = dict(pairs_of(network))
    before = {"norm": 0, "relu": 0, "sum": 0}
    after = {"norm": 0, "fused": 0, "fused, sum": 0}
    for norm, size in sizes.items():
        adds = known.get(norm)
        for kind in ("norm", *(() if adds is None else ("relu", "sum") if adds else ("relu",))):
            before[kind] += size * sum(PASSES[kind])
        kind = "norm" if adds is None else "fused, sum" if adds else "fused"
        after[kind] += size * sum(PASSES[kind])
    step = roofline_bytes()
    saved = sum(before.values()) - sum(after.values())
    return {"before": before, "after": after, "step": step, "step_after": step - saved}


def roofline_bytes() -> float:
    """Return bytes an image of a whole step in separate operations, by `mprun bench --roofline`."""
    command = ["bench", "--roofline", *CASE, "--mode", "fp16_master_scaled", "--json"]
    done = _mprun(command)
    kinds = json.loads(done)["modes"]["fp16_master_scaled"]["kinds"]
    return sum(kind["bytes"] for kind in kinds) / 256


def hosted(value: str) -> list[dict]:
    """Return the rows of `mprun bench --host` with train.fused_norm=VALUE."""
    with tempfile.TemporaryDirectory() as folder:
        asked = ["train.channels_last=on", f"train.fused_norm={value}", "--out", folder]
        _mprun(["bench", "--host", *CASE, *asked, "--modes", ",".join(MODES)])
        return json.loads((Path(folder) / "host.json").read_text())["rows"]


def least(turns: list[dict[str, list[dict]]]) -> dict[str, list[dict]]:
    """Return the first turn's rows with the least host time of all turns."""
    for value, rows in turns[0].items():
        for number, row in enumerate(rows):
            row["host_ms"] = min(turn[value][number]["host_ms"] for turn in turns)
    return turns[0]


def _mprun(words: list[str]) -> str:
    command = [sys.executable, "-m", "mprun", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def page(found: dict) -> str:
    compared, different = (found["interpreter"][key] for key in ("compared", "different"))
    of: dict[tuple[str, str], list[int]] = {}
    for label, count in compared.items():
        _, dtypes, form = label.split(", ", 2)
        counts = of.setdefault((dtypes, form), [0, 0])
        counts[0] += count
        counts[1] += different[label]
    bits = [[*key, f"{count:,}", f"{apart:,}"] for key, (count, apart) in of.items()]
    built = [
        [target, str(len(forms)), str(sum(not own for own in forms.values()))]
        for target, forms in found["compiled"].items()
    ]
    own = found["bytes"]
    before, after = (sum(own[key].values()) / 1e6 for key in ("before", "after"))
    rows = []
    for value, measured in found["host"].items():
        for row in measured:
            kinds = ("launches", "triton", "library")
            if row["why_not"] is not None:
                raise RuntimeError(row["why_not"])
            total = sum(row[kind] for kind in kinds)
            counts = [f"{row[kind]:.0f}" for kind in kinds]
            work = "" if row["work"] is None else f"{row['work']:.0f}"
            peak = "" if row["peak"] is None else f"{row['peak'] / 2**20:,.0f}"
            place = [row["mode"], row["execution"], value]
            rows.append([*place, *counts, f"{total:.0f}", work, peak, f"{row['host_ms']:.1f}"])
    header = ["mode", "", "fused_norm", "launches", "Triton", "library", "together", "replayed"]
    failed = found["interpreter"]["failed"]
    return _PAGE.format(
        bits=markdown_table(["maps", "form", "numbers compared", "different"], bits),
        compared=sum(compared.values()),
        different=sum(different.values()),
        checks="all passed" if not failed else f"failed: {', '.join(failed)}",
        built=markdown_table(["for", "forms", "sound"], built),
        before=before,
        after=after,
        step=own["step"] / 1e6,
        step_after=own["step_after"] / 1e6,
        rows=markdown_table([*header, "peak MiB", "host ms"], sorted(rows)),
    )


_PAGE = """\
# BatchNorm, residual sum and ReLU as one kernel each way

No kernel has run on a GPU yet: this page says what is known without one. Whether the kernels are
faster, `train.fused_norm=auto` measures at the start of a run, and `scripts/gpu_check` (part
`fused_norm`) on the first day. Made by `benchmarks/fused_norm.py`.

## Bits

In Triton's interpreter, against the same sums and roundings in separate operations of torch,
forward and backward with the running statistics: {compared:,} numbers, {different} different (a
NaN equals a NaN). Six shapes: chunks and tiles that are not full, odd channels, one channel, maps
of one pixel, one image, two rows. Among the values: infinities, NaN, no variance, subnormal and
largest numbers. "sum": with a residual; "plain": no ReLU.

{bits}

Statistics and gradients against torch in float64 are within bounds derived from the depth of the
sums; watched modules, which compute one by one, give the bits of the fused ones; FP32 evaluation is
torch's (`tests/extensions/fused_norm/norms_in_interpreter.py`): {checks}.

## Instructions

Every form for FP32, FP16 and BF16 maps, and for FP16 parameters, compiled ahead of time. Sound: no
FP32 product contracted with a sum, no approximate division or root, no flush of subnormal numbers,
no atomics, rounding to the nearest, loads of 16 bytes.

{built}

## Bytes

Counted for an image of 224 px in 16 bits, by reads and writes of whole maps: norms, ReLUs and sums
of ResNet-50 move {before:.0f} MB in separate operations and {after:.0f} MB fused; a whole step
{step:.0f} and {step_after:.0f} MB. 49 of the 53 norms have a ReLU in reach. A fused norm reads its
input twice each way: its sums have to be known before the first value.

## The host's side of a step

ResNet-50, batch 256, 224 px, NHWC, on the fake CUDA device, where no kernel runs. A fused pair is
six launches of Triton: sums, their end and the maps, forward and backward. Separate modules are two
calls of cuDNN (each one or more kernels, which are not counted) and three launches, four with a
sum. "replayed": what a CUDA graph launches at once. Host: median milliseconds of a step, the less
of two turns on a machine whose two cores had other work: they vary by a factor of two.

{rows}
"""


if __name__ == "__main__":
    raise SystemExit(main())
