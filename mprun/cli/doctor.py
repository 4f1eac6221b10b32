"""`mprun doctor`: tell what this machine has, and which precision modes run on it."""

import json
import time
from collections.abc import Iterator

from mprun.cli.arguments import Arguments, number
from mprun.config.option_files import folders
from mprun.errors import DONE
from mprun.record.layout import hanging

# Keys of --json, in this order and on every machine; "works" is null if it was not tested.
KEYS = {
    "device": 'what device=auto takes: "cuda:0" or "cpu"',
    "why_no_gpu": "why torch cannot use one; null: it can",
    "machine": "cpu, cpu_count, threads, platform, python, packages (versions), mprun, "
    "commit, dirty (local changes), memory_bytes",
    "gpus": "a list: index, name, compute_capability, multiprocessors, total_bytes, free_bytes, "
    "why (it cannot be read)",
    "kernels": "cpu: capability, onednn, units_16_bit; cuda (null without a GPU): version, "
    "driver, cudnn, tf32, bf16",
    "fused_updates": "by optimizer, torch's update in one kernel: works, why (not)",
    "cuda_graph": "whether a captured training step replays as the eager one: works, why (not)",
    "ranks": "backends of several ranks (gloo, nccl and its version), environment (world and rank "
    "that torchrun or srun have set; null: none)",
    "nvml": "works, why (not); energy_mj (since the driver was loaded), power_w, sm_clock_mhz, "
    "temperature_c, process_bytes (of this process); missing: why, by reading",
    "modes": "by mode: verdict (honoured, emulated, refused, untested: no time left), reason (how, "
    "or why)",
    "emulated_operations": "which operations of 16-bit modes a CPU computes in FP32",
    "flags": "by name: pinned (what a run sets, here that of fp32), stock (torch by itself)",
}
_WHAT = """\
Tell what this machine has, and which precision modes run on it. On a GPU,
doctor compiles the kernels of the update, compares them with torch's, and
captures a training step as a CUDA graph. That takes seconds, longer the first
time (--budget limits them).
Exit code 0, whatever it finds; 2 for an unknown argument."""
# Measured; see mprun.precision.emulation.
_WHY_EMULATED = (
    "native CPU kernels add some gradients up in 16 bits and, in FP16, take 10 to 60 times "
    "as long (cpu_half=native selects them)"
)


def main(arguments: list[str]) -> int:
    """Print devices, kernels, flags and the effect of each mode here; always exit code 0."""
    keys = [f"  {key:<21}{text}" for key, text in KEYS.items()]
    started = time.monotonic()
    parser = Arguments("doctor", _WHAT, "\n".join(["keys of --json:", *keys]))
    help_json = 'one JSON object instead of the page; "works": null is not tested'
    parser.add_argument("--json", action="store_true", help=help_json)
    help_dir = "also the modes of DIR/precision/*.yaml"
    parser.add_argument("--config-dir", metavar="DIR", help=help_dir)
    parser.add_argument("--budget", dest="budget_s", metavar="SECONDS",
        type=number("--budget", 0, 86_400, "seconds"),
        help="seconds after which the remaining tests are reported as not tested")  # fmt: skip
    options = parser.parse(arguments)
    folders(options.config_dir)
    from mprun.cli.machine import machine_facts  # it imports torch

    ends = None if options.budget_s is None else started + options.budget_s
    facts = machine_facts(options.config_dir, ends)
    print(json.dumps(facts, indent=1, allow_nan=False) if options.json else page(facts))
    return DONE


def page(facts: dict) -> str:
    """Format the facts of `mprun.cli.machine.machine_facts` for a terminal of 80 columns."""
    lines = [hanging(summary(facts), 80, 4), ""]
    lines += [_wrapped(f"{name:<14}", text) for name, text in _rows(facts)]
    lines += ["", f"{'mode':<20} on this machine"]
    for name, mode in facts["modes"].items():
        lines.append(_wrapped(f"{name:<20} {mode['verdict']:<9} ", mode["reason"]))
    if facts["emulated_operations"]:
        lines += ["", _wrapped("", f"emulated, because {_WHY_EMULATED}:")]
        lines.append(_wrapped("  ", ", ".join(facts["emulated_operations"])))
    lines += ["", "flags that a run pins (here: fp32), and torch's defaults if they differ"]
    for name, flag in facts["flags"].items():
        differs = flag["stock"] != flag["pinned"]
        stock = f"   (torch: {flag['stock']})" if differs else ""
        lines.append(f"  {name} = {flag['pinned']}{stock}")
    return "\n".join(lines)


def summary(facts: dict) -> str:
    """Return in a line what will happen here; what does not work comes first."""
    wrong = [f"GPU {gpu['index']} cannot be read" for gpu in facts["gpus"] if gpu["why"]]
    tests = {"CUDA graphs": facts["cuda_graph"]}
    tests["energy (NVML)"] = facts["nvml"] if facts["gpus"] else {"works": None}
    wrong += [f"no {what}" for what, one in tests.items() if one["works"] is False]
    if not facts["kernels"]["cpu"]["onednn"]:
        wrong.append("no oneDNN")
    by_verdict: dict[str, list[str]] = {}
    for name, mode in facts["modes"].items():
        by_verdict.setdefault(mode["verdict"], []).append(name)
    where = "CPU only: modes below FP32 are emulated"
    if facts["gpus"]:
        count = f"{len(by_verdict.get('honoured', []))} of {len(facts['modes'])} modes"
        where = f"CUDA on {facts['gpus'][0]['name']}: {count} run in its arithmetic"
    updates = {f"fused {rule}": answer for rule, answer in facts["fused_updates"].items()}
    answers = updates | ({"CUDA graphs": facts["cuda_graph"]} if facts["gpus"] else {})
    cut = [what for what, answer in answers.items() if answer["works"] is None]
    if cut := [*cut, *by_verdict.get("untested", [])]:
        wrong.append(f"not tested for lack of time: {', '.join(cut)}")
    refused = f", refused: {', '.join(by_verdict['refused'])}" if "refused" in by_verdict else ""
    if not wrong:
        return f"{where}{refused}; nothing is missing"
    return f"{', '.join(wrong)} (see below); {where}{refused}"


def _rows(facts: dict) -> list[tuple[str, str]]:
    machine, cpu = facts["machine"], facts["kernels"]["cpu"]
    rows = [(f"GPU {gpu['index']}", _gpu(gpu)) for gpu in facts["gpus"]]
    if facts["why_no_gpu"] is not None:
        rows.append(("device", f"no GPU that torch can use ({facts['why_no_gpu']})"))
    counts = f"{machine['cpu_count']} cores, {machine['threads']} threads"
    rows.append(("CPU", f"{machine['cpu']}, {counts}, {_gib(machine['memory_bytes'])}"))
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    rows.append(("versions", f"python {machine['python']}, {versions}"))
    commit = f"commit {machine['commit']}" if machine["commit"] else "installed"
    changes = " with local changes" if machine["dirty"] else ""
    rows.append(("mprun", f"{machine['mprun']}, {commit}{changes}"))
    onednn = "oneDNN" if cpu["onednn"] else "no oneDNN"
    units = ", ".join(cpu["units_16_bit"]) or "none"
    rows.append(("CPU kernels", f"{cpu['capability']}, {onednn}, 16-bit units: {units}"))
    if (cuda := facts["kernels"]["cuda"]) is not None:
        names = ", ".join(f"{'' if cuda[key] else 'no '}{key.upper()}" for key in ("tf32", "bf16"))
        driver = f"driver {cuda['driver'] or 'unknown'}"
        rows.append(("CUDA", f"{cuda['version']}, {driver}, cuDNN {cuda['cudnn']}, {names}"))
    graph = _answer(facts["cuda_graph"], "a training step is captured, and replays alike")
    names, found = facts["ranks"]["backends"], facts["ranks"]["environment"]
    backends = ", ".join(f"{name} {v}".strip() for name, v in names.items()) or "none"
    here = "started by nobody" if found is None else f"rank {found['rank']} of {found['world']}"
    return [
        *rows,
        *_by_optimizer("fused updates", facts["fused_updates"]),
        ("CUDA graph", graph),
        ("several ranks", f"{backends}; {len(facts['gpus'])} GPUs; {here}"),
        ("NVML", _nvml(facts["nvml"])),
    ]


def _by_optimizer(title: str, answers: dict) -> Iterator[tuple[str, str]]:
    """Yield rows of a test for every optimizer; equal answers share a row."""
    rules: dict[str, list[str]] = {}
    for rule, answer in answers.items():
        rules.setdefault(_answer(answer, "yes"), []).append(rule)
    for text, names in rules.items():
        yield title, f"{', '.join(names)}: {text}"
        title = ""


def _answer(answer: dict, yes: str) -> str:
    if answer["works"]:
        return yes
    return f"{'not tested' if answer['works'] is None else 'no'}: {answer['why']}"


def _gpu(gpu: dict) -> str:
    free = "unknown" if gpu["free_bytes"] is None else _gib(gpu["free_bytes"])
    why = f" ({gpu['why']})" if gpu["why"] else ""
    return (
        f"{gpu['name']}, compute capability {gpu['compute_capability']}, "
        f"{gpu['multiprocessors']} multiprocessors, {_gib(gpu['total_bytes'])}, free: {free}{why}"
    )


def _nvml(nvml: dict) -> str:
    if not nvml["works"]:
        return f"no: {nvml['why']}"
    readings = {"power_w": "{:.0f} W", "sm_clock_mhz": "{:.0f} MHz", "temperature_c": "{:.0f} C"}
    texts = [text.format(nvml[key]) for key, text in readings.items() if nvml[key] is not None]
    if nvml["energy_mj"] is not None:
        texts.append("an energy counter")
    if nvml["process_bytes"] is not None:
        texts.append(f"{_gib(nvml['process_bytes'])} of this process")
    missing = [f"no {reading}: {why}" for reading, why in nvml["missing"].items()]
    return "; ".join([", ".join(texts) or "no reading", *missing])


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _wrapped(start: str, text: str) -> str:
    return hanging(text, 80, len(start), start)
