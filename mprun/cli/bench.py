"""`mprun bench`: speed, memory and energy of precision modes, beside other tools if asked for."""

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from mprun.bench.options import Options, check_overrides, device_of, parse
from mprun.errors import BUG, DONE, INTERRUPTED, RESOURCE, BadInput

_REPORT_S = 6.0  # kept back for tables and figure
_USAGE = """\
mprun bench                       : the suite: ResNet-50, AlexNet, DCGAN, LSTM language models on a
                                    GPU, small sizes of them on a CPU
mprun bench model=... [key=value] : one configuration
mprun bench --host ...            : will it fit, and what does the host need? Memory to the byte,
                                    launches and host time of a CUDA step, without a GPU: on a fake
                                    CUDA device (needs a CUDA build of torch and a C compiler)
mprun bench --roofline ...        : FLOPs, bytes and limits of a step, without a GPU
                                    (mprun bench --roofline --help)

Each contender of a model runs in a process of its own; their windows follow one another round
robin. Batches lie on the device. Nothing is timed that does not compute what the others do.

Options
  --modes A,B        precision modes (fp32,tf32,fp16_naive,fp16_master_scaled,amp,amp_bf16 on a GPU;
                     fp32,fp16_master_scaled,amp on a CPU)
  --peers [A,B]      other tools beside mprun: all, or names of
                     {peers}
                     (the suite takes all of them in 16-bit modes, the loop alone in FP32, TF32)
  --only A,B         of the suite the models whose names begin so: ResNet-50 b256,DCGAN
  --budget SECONDS   the whole bench ends by then, with what is there (540)
  --out DIR          where to write (outputs/bench/...); must not exist
  --windows N        windows of each contender (5)
  --steps-per-window K   steps of a window (as many as last 0.3 s)
  --end-to-end       also with the data source of the configuration, loading included
  --plain            mprun with its defaults alone, not with its best settings as well
  --card GIB         with --host: what fits a card with that much memory
  --json             print bench.json instead of the tables

Writes bench.jsonl (windows as they are measured), bench.json, bench.md, bench.png, logs/.
Exit codes: 0 done, 2 bad input, 5 nothing measured for want of memory, 130 interrupted.
"""


def main(arguments: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    if "--roofline" in arguments:
        from mprun.cli.roofline import main as roofline

        return roofline([argument for argument in arguments if argument != "--roofline"])
    if "--help" in arguments or "-h" in arguments:
        from mprun.bench.registry import PEERS

        print(_USAGE.format(peers=", ".join(PEERS)), end="")
        return DONE
    started = time.monotonic()
    options = parse(arguments)
    # Checked before torch is loaded.
    from mprun.config.compose import compose_config

    check_overrides(options.overrides)
    compose_config(options.overrides)
    if options.host:
        from mprun.bench.host import main as host

        return host(arguments, options)
    from mprun.bench.plan import plan
    from mprun.training.run import resolve_device

    device = resolve_device(device_of(options.overrides))
    groups, left_out = plan(options, device)
    folder = claimed(options, groups)
    return _measure(options, device, groups, left_out, folder, started)


def claimed(options: Options, groups: list) -> Path:
    """A new folder for this bench; BadInput where --out exists already."""
    from mprun.record.run_directory import claim

    if options.out is None:
        label = groups[0].label if len(groups) == 1 else "suite"
        return claim(Path("outputs/bench"), "".join(c if c.isalnum() else "_" for c in label))
    path = Path(options.out)
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if not path.is_dir() or any(path.iterdir()):
            raise BadInput(f"--out {path}: exists and is not empty; give another folder") from None
    except OSError as error:
        raise BadInput(f"--out {path}: cannot be made ({error.strerror})") from None
    return path


def _measure(options, device, groups, left_out, folder: Path, started: float) -> int:
    from mprun.bench.result import assemble, write_all
    from mprun.bench.run_bench import run_bench
    from mprun.training.signals import Interruption

    deadline = started + options.budget_s - _REPORT_S
    with Interruption() as interruption:
        outcome = run_bench(options, device, groups, folder, interruption, deadline)
        bench = assemble(options, device, outcome, left_out)
        bench["created"] = datetime.now(UTC).isoformat(timespec="seconds")
        bench["elapsed_s"] = time.monotonic() - started
        text = write_all(folder, bench)
    if options.json:
        print(json.dumps(bench, indent=1, allow_nan=False))
    else:
        print(f"{text}\nbench: {folder}")
    return exit_code(bench)


def exit_code(bench: dict) -> int:
    """130 if interrupted; where nothing was measured 5 for want of memory, 1 for another error."""
    if bench["ended"] == "interrupted":
        return INTERRUPTED
    rows = bench["rows"]
    if any(row["windows"] for row in rows):
        return DONE
    kinds = {row["kind"] for row in rows if row["status"] == "failed"}
    print("mprun: bench: nothing was measured; the report says why", file=sys.stderr)
    if not kinds:
        return DONE
    return RESOURCE if kinds == {"memory"} else BUG
