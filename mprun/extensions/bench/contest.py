"""A contest: the cases of a bench, how they are compared, and the report."""

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import torch

from mprun.assembly import policy_from
from mprun.config.compose import compose_config
from mprun.config.rules import updates_in_16_bits
from mprun.errors import BadInput
from mprun.extensions.bench.cases import REFERENCES, BenchGroup, BenchRow, Case, without_device
from mprun.extensions.bench.report import markdown
from mprun.extensions.bench.summary import summarise
from mprun.precision import why_no_lstm, why_unsupported

# The modes measured by default, baselines first: on a GPU with Tensor Cores for BF16 and TF32, and
# on a CPU.
GPU_MODES = ("fp32", "tf32", "fp16_naive", "fp16_master_scaled", "amp", "amp_bf16")
CPU_MODES = ("fp32", "fp16_master_scaled", "amp")


class Contest:
    """One configuration in mprun's modes; a subclass adds other contenders.

    `options` are those of the command line (`mprun.extensions.bench.command.bench_parser`).

    Attributes:
        worker: "module:class" of the `Worker` in a child.
    """

    worker = "mprun.extensions.bench.worker:Worker"

    def plan(self, options: Namespace, device: torch.device) -> tuple[list[BenchGroup], list[dict]]:
        """Return the groups to measure, and label, mode, contender and reason of each omission.

        Raises:
            BadInput: this device or configuration cannot run a requested mode.
        """
        groups: list[BenchGroup] = []
        left_out: list[dict] = []
        for group in self.groups(options, device):
            cases: list[Case] = []
            for mode in group.modes:
                more = {"config_dir": options.config_dir, "extra": {"compile": group.compile}}
                case = Case(group.label, group.overrides, mode, "mprun", **more)
                contenders = {"mprun": why_not(case, device)}
                if contenders["mprun"] is None:
                    contenders |= self.others(group, case, options, device)
                elif options.modes is not None:
                    raise BadInput(f"--modes {mode}: {contenders['mprun']}")
                for name, reason in contenders.items():
                    if reason is None:
                        cases.append(replace(case, contender=name))
                    else:
                        what = {"label": case.label, "mode": mode, "contender": name}
                        left_out.append(what | {"reason": reason})
            cases.sort(key=self.turn)
            if options.end_to_end:
                own = [case for case in cases if case.contender == "mprun"]
                cases += [replace(case, real_data=True) for case in own]
            groups.append(replace(group, cases=tuple(cases)))
        return groups, left_out

    def groups(self, options: Namespace, device: torch.device) -> list[BenchGroup]:
        """Return the models to measure, still without cases, from the command line."""
        config = compose_config(options.overrides, options.config_dir).config
        size = getattr(config.data, "image_size", None)
        shape = f" {size} px" if size else ""
        label = f"{config.model.name}{shape} b{config.data.batch_size}"
        modes = options.modes or (GPU_MODES if device.type == "cuda" else CPU_MODES)
        return [BenchGroup(label, without_device(options.overrides), tuple(modes))]

    def others(
        self, group: BenchGroup, case: Case, options: Namespace, device: torch.device
    ) -> dict[str, str | None]:
        """Return contenders beside mprun: name -> None, or why a requested one is left out."""
        native = device.type == "cuda" or case.config().cpu_half == "native"
        best = native and not options.plain
        return {"mprun+": None} if best and case.mode in (group.best_modes or group.modes) else {}

    def turn(self, case: Case) -> int:
        """Return the sort key of a case: mprun's defaults, its best settings, those in FP32."""
        if case.contender == "mprun":
            return 0
        return 2 if case.mode in REFERENCES else 1

    def partner(self, case: Case) -> Case | None:
        """Return the case to measure again beside this one if memory did not hold both."""
        return None

    def check(self, rows: Sequence[BenchRow]) -> dict[str, tuple[bool, str]]:
        """Return for each row key whether the row computes the same as the others, and a reason.

        Best settings are compared with defaults, and modes that should learn like FP32 with FP32. A
        row fails if its loss is not finite, or if it skips other updates than the same mode. The
        distance of losses is only reported: the growth of rounding depends on the model.
        """
        own = {row.case.mode: row for row in rows if row.case.contender == "mprun"}
        answers = {}
        for row in rows:
            modes = {row.case.mode: None} | ({"fp32": None} if learns_as_fp32(row.case) else {})
            others = [own[mode] for mode in modes if own.get(mode, row) is not row]
            found = [_held_to(other, row) for other in others]
            wrong = [reason for ok, reason in found if not ok]
            notes = "; ".join(reason for _, reason in found if reason)
            answers[row.key] = (not wrong, wrong[0] if wrong else notes)
        return answers

    def summarise(self, bench: dict) -> None:
        """Put what follows from the windows into the content of bench.json."""
        summarise(bench["rows"])

    def report(self, bench: dict) -> str:
        """Return the text of bench.md."""
        return markdown(bench)


def why_not(case: Case, device: torch.device) -> str | None:
    """Return why nobody can train this case here; BadInput if it cannot be configured."""
    config = case.config()
    policy = policy_from(config.precision)
    reason = why_unsupported(policy, device)
    if reason is None and config.model.component.recurrent and device.type == "cuda":
        reason = why_no_lstm(policy, device)
    if reason is None:
        case.config(f"device={device.type}")
    return reason


def learns_as_fp32(case: Case) -> bool:
    """Return whether the mode loses neither small updates nor small gradients."""
    config = case.config()
    policy = policy_from(config.precision)
    unscaled = policy.matmul is not None and policy.matmul.granularity == "none"
    loses_gradients = torch.float16 in policy.formats or unscaled
    loses_updates = updates_in_16_bits(config.precision)
    return not loses_updates and not (loses_gradients and config.scaler.kind == "none")


def _held_to(other: BenchRow, row: BenchRow) -> tuple[bool, str]:
    mine, theirs = row.equality["losses"], other.equality["losses"]
    where = f"{other.case.contender} in {other.case.mode}"
    for step, (loss, expected) in enumerate(zip(mine, theirs, strict=True), start=1):
        if math.isfinite(expected) and not math.isfinite(loss):
            return False, f"loss {loss} at step {step}, {expected:.5g} in {where}"
    skipped, expected_skips = row.equality["skipped"], other.equality["skipped"]
    if skipped != expected_skips:
        text = f"{skipped} updates skipped, {expected_skips} by {where}"
        return row.case.mode != other.case.mode, text
    apart = abs(mine[-1] - theirs[-1]) / max(abs(theirs[-1]), 1e-30)
    return True, f"loss {apart:.1e} apart from {where} at step {len(mine)}" if apart > 0 else ""
