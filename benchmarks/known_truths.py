"""Runs with a known right verdict, judged by `mprun compare`.

FP32 against FP32 with other seeds must be neither worse nor better, and correct modes must match.
Modes with a planted defect must not match: a loss scale that is applied but never removed, master
weights that are copied once and never again, a wrong learning rate.

    python benchmarks/known_truths.py FOLDER [--steps N] [--seeds N] [--jobs N]

prints one line a truth and leaves runs and reports in FOLDER; exit code 1 if one is broken. The
defects are patches of this process: the package has no switch for them. Every run writes the
defect's effects beside its directory (`planted.json`): a defect without an effect breaks its truth.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REFUSED = {"matches"}
MOVED = {"worse", "likely worse", "better", "likely better", "diverged", "invalid baseline"}


@dataclass(frozen=True, slots=True)
class Truth:
    """One arm and the verdicts that it must not get."""

    name: str
    overrides: tuple[str, ...]
    never: frozenset[str]
    defect: str = "none"
    other_seeds: bool = False  # seeds n .. 2n-1: the baseline shares no seed
    allow: str | None = None


SCALED = ("precision=fp16_master_scaled", "scaler=static")
TRUTHS = (
    Truth("fp32_other_seeds", ("precision=fp32",), frozenset(MOVED), other_seeds=True),
    Truth("fp16_master_scaled", ("precision=fp16_master_scaled",), frozenset(MOVED)),
    Truth("amp", ("precision=amp",), frozenset(MOVED)),
    Truth("fp16_naive", ("precision=fp16_naive",), frozenset(REFUSED)),
    Truth("scale_not_removed", (*SCALED, "scaler.scale=8"), frozenset(REFUSED), "scale_stays"),
    Truth("masters_not_copied", ("precision=fp16_master",), frozenset(REFUSED), "no_copies"),
    Truth("rate_off", ("optim.lr=0.024",), frozenset(REFUSED), allow="optim.lr"),
)


def plant(defect: str) -> dict[str, int]:
    """Break the engine of this process in the named way.

    Returns the defect's effects so far: "acted", the calls in which it changed a number.
    """
    import torch

    from mprun.precision import LossScale
    from mprun.prepared import tensors

    planted = {"acted": 0}
    if defect == "scale_stays":

        def one(self):
            planted["acted"] += int(self.scale.item() != 1)
            return torch.ones((), device=self.scale.device)

        LossScale.inverse = one
    elif defect == "no_copies":
        made, kept = tensors.make_nodes, dict[int, torch.Tensor]()

        def as_first(owner, what, dtype, given):
            copies = made(owner, what, dtype, given)
            if what == "weight" and dtype is not None:
                for own, copy in zip(given, copies, strict=True):
                    first = kept.setdefault(id(own), copy.detach().clone())
                    planted["acted"] += int(not torch.equal(first, copy))
                    copy.data.copy_(first)
            return copies

        tensors.make_nodes = as_first
    elif defect == "decay_apart":
        # OneTrainer #996: BF16 weights decay in a separate operation, whose result
        # is rounded to nearest, before an update that is rounded stochastically.
        step = torch.optim.AdamW.step

        @torch.no_grad()
        def decay_first(self, *arguments, **named):
            decays = [group["weight_decay"] for group in self.param_groups]
            for group in self.param_groups:
                for weight in group["params"]:
                    decayed = weight * (1 - float(group["lr"]) * group["weight_decay"])
                    rounded = decayed.bfloat16().float()
                    planted["acted"] += int(not torch.equal(rounded, decayed))
                    weight.copy_(rounded)
                group["weight_decay"] = 0.0
            done = step(self, *arguments, **named)
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
            return done

        torch.optim.AdamW.step = decay_first
    elif defect != "none":
        raise ValueError(f"{defect}: no such defect")
    return planted


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=max(1, min(4, os.cpu_count() or 1)))
    given = parser.parse_args()
    common = ["experiment=quickstart_lost_updates", "device=cpu", "threads=1"]
    common += [f"train.steps={given.steps}", f"train.eval_every={given.steps}"]
    baseline = Truth("fp32", ("precision=fp32",), frozenset())
    jobs = []
    for truth in (baseline, *TRUTHS):
        first = given.seeds if truth.other_seeds else 0
        for seed in range(first, first + given.seeds):
            place = given.folder / truth.name / f"s{seed}"
            if not (place / "run.json").is_file():
                jobs.append((truth.defect, [*common, *truth.overrides, f"seed={seed}", place]))
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(lambda job: _run(*job), jobs))
    return max([_judge(given.folder, truth) for truth in TRUTHS])


def _run(defect: str, words: list) -> None:
    *overrides, place = words
    place.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--run", defect, *overrides, f"output_dir='{place}'"]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)}: {ended.stderr}")


def _not_planted(folder: Path, truth: Truth) -> list[str]:
    """List runs of an arm whose planted defect did nothing, or that had one without planting."""
    wrong = []
    for place in sorted((folder / truth.name).glob("s*.planted.json")):
        acted = json.loads(place.read_text(encoding="utf-8"))["acted"]
        if (acted > 0) != (truth.defect != "none"):
            wrong.append(f"{place.stem}: the defect acted {acted} times")
    return wrong


def _judge(folder: Path, truth: Truth) -> int:
    """Print the verdict on one truth; return 1 if it is a forbidden one."""
    baseline, arm = str(folder / "fp32"), str(folder / truth.name)
    command = [sys.executable, "-m", "mprun", "compare", baseline, arm, "--baseline", baseline]
    command += ["--json", "--out", str(folder / f"report-{truth.name}")]
    if truth.allow:
        command += ["--allow", truth.allow]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        print(f"BROKEN  {truth.name}: exit {ended.returncode}: {ended.stderr.strip()}")
        return 1
    [row] = json.loads(ended.stdout)["groups"][0]["modes"]
    verdict = row["verdict"]
    controls = _not_planted(folder, truth)
    wrong = verdict["name"] in truth.never or bool(controls)
    said = "; ".join([verdict["sentence"], *controls])
    print(f"{'BROKEN' if wrong else 'ok':7} {truth.name}: {verdict['name']}: {said}")
    return int(wrong)


def _run_here(defect: str, *overrides: str) -> int:
    """Run once in this process; write the defect's effects beside the run directory."""
    from mprun.cli import main as mprun

    planted = plant(defect)
    code = mprun(list(overrides))
    place = Path(overrides[-1].partition("=")[2].strip("'"))
    evidence = place.with_name(f"{place.name}.planted.json")
    evidence.write_text(json.dumps({"defect": defect, **planted}), encoding="utf-8")
    return code


if __name__ == "__main__":
    raise SystemExit(_run_here(*sys.argv[2:]) if sys.argv[1:2] == ["--run"] else main())
