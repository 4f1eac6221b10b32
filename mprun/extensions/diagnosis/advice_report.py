"""The findings of `mprun advise` as about 25 lines."""

import math
import shlex
from functools import partial

from mprun.comparison.wording import signed
from mprun.extensions.diagnosis.advice import Advice, Worst, words
from mprun.extensions.diagnosis.casts import (
    OFF_THRESHOLD,
    cast_changes,
    how_far,
    in_words,
    percent,
    verdicts,
)
from mprun.extensions.diagnosis.trials import FP32, PART_OF_FP32, Mixed, Tried
from mprun.record.layout import aligned

_LAYERS = 8
_HINT = "mprun advise KEY=VALUE ... precision=nvfp4 (or other)"


def as_text(advice: Advice, width: int | None = None) -> list[str]:
    """Return lines for the console, without the last one; what was asked for comes first.

    width: of tables; None: any.
    """
    check = _check(advice.check) if advice.check else []
    mixed = _mixed(advice.mixed, width) if advice.mixed else []
    return [*mixed, *findings(advice, width), *_tried(advice, width), *check]


def _rows(tried: list[Tried], width: int | None) -> list[str]:
    """Return a table of trials."""
    words = {True: "holds", False: "fails", None: "-"}
    rows = [(one.change, words[one.cures], one.taken, one.result) for one in tried]
    return [f"  {line}" for line in aligned(rows, width=width and width - 2)]


def _mixed(mixed: Mixed, width: int | None) -> list[str]:
    """Return the assignment that was searched for."""
    head = f"mixed assignment at most {percent(mixed.bound)} above FP32's loss: "
    table = _rows(mixed.tried, width)
    if mixed.out is None:
        return [f"{head}none of the tried sets", *table]
    left = f"without {', '.join(mixed.out)}" if mixed.out else "the mode as it is"
    cost = f"{percent(mixed.products)} of the products of layers leave the mode"
    gap = f"{100 * mixed.gap:+.2f} % from FP32 when it was tried, one seed; {cost}"
    file = [f"  {line}" for line in mixed.file.splitlines()]
    return [f"{head}{left}", f"  {gap}", *table, f"precision/{mixed.name}.yaml", *file,
            "use it", f"  {mixed.command}"]  # fmt: skip


def findings(advice: Advice, width: int | None = None, hint: str = _HINT) -> list[str]:
    """Return what was measured and follows from it; hint: how to ask about casts."""
    parts = [_masters, _scaling, _fp32]
    casts = partial(_casts, width=width and width - 2, hint=hint)
    parts.insert(0 if advice.casts is not None else len(parts), casts)
    lines = [*_verdicts(advice), *_evidence(advice)]
    for number, part in enumerate(parts, 1):
        head, *more = part(advice)
        lines += [f"{number} {head}", *more]
    return lines


def _tried(advice: Advice, width: int | None) -> list[str]:
    """Return what was tried and the commands of what holds."""
    part = percent(PART_OF_FP32)
    lines = [f"tried beside FP32; holds: finite, updates applied, at most {part} above FP32's loss"]
    lines[0] += " or of what FP32 learnt"
    lines += _rows(advice.tried, width)
    commands = {_use(advice): advice.command}
    if (casts := advice.casts) is not None:
        of_casts = f"use it with {' '.join(casts.mode)}"
        commands = {of_casts: casts.command, **commands}
        if not casts.command:
            lines.append(f"no tried form of {' '.join(casts.mode)} holds")
    for what, line in commands.items():
        lines += [what, f"  {line}"] if line else []
    if not advice.command:
        lines.append("no command: no mode was tried to its end and held (--seconds S)")
    return lines


def _use(advice: Advice) -> str:
    if advice.overrides == [*FP32]:
        return "use FP32: no tried 16-bit mode trains like it"
    half = "BF16" if any("bf16" in word for word in advice.overrides) else "FP16"
    return f"use it in {half}"


def _verdicts(advice: Advice) -> list[str]:
    """Return a sentence on the mode that was asked for, and one on FP16."""
    found, needs = [], _needs_of_fp16(advice)
    if (casts := advice.casts) is not None:
        kept = len(casts.losses) - len(casts.excluded)
        worst, *_ = verdicts(casts.losses)
        found = [f"{' '.join(casts.mode)} suits {kept} of {len(casts.losses)} layers: "]
        found[0] += how_far(worst)
    *first, last = needs or ["neither master weights nor a loss scale"]
    return [*found, f"FP16 needs {', '.join(first)}{' and ' * bool(first)}{last}"]


def _needs_of_fp16(advice: Advice) -> list[str]:
    masters, scaling = advice.master_weights.needed, advice.loss_scaling
    needs = ["master weights"] * bool(masters)
    needs += ["perhaps master weights"] * (masters is None)
    if scaling.range is None:
        needs.append("perhaps a loss scale")
    elif scaling.needed:
        scale = f"a loss scale of 2^{scaling.range.recommended}"
        needs.append(scale if scaling.range.fits else f"{scale} (which still loses too much)")
    if advice.keep_fp32:
        modules = dict.fromkeys(one.module for one in advice.keep_fp32)
        needs.append(f"FP32 in {', '.join([*modules][:3])}")
        needs[-1] += f" and {len(modules) - 3} more" * (len(modules) > 3)
    return needs


def _check(check: dict) -> list[str]:
    lines = [
        f"check: {check['seeds']} seeds of {check['steps']} steps beside FP32 "
        f"({check['metric']} {check['baseline']:.5g}); brief, and no word on a whole run"
    ]
    for arm in check["arms"]:
        value, difference = arm["difference"], "no final value"
        if value is not None and arm["margin"]:
            number = signed(value, arm["margin"], [value])
            difference = f"{number} {arm['unit']}".rstrip() + " from FP32 (positive is worse)"
        skipped = f"    {difference}, {arm['skipped']} skipped updates"
        lines += [f"  {arm['name']}: {arm['overrides']}", skipped, f"    {arm['verdict']}"]
    return [*lines, f"  for the report: mprun compare {shlex.quote(check['folder'])}"]


def _evidence(advice: Advice) -> list[str]:
    found = advice.evidence
    formats = "+".join(found.formats).upper() or "no gradients"
    rate = " to ".join(f"{lr:g}" for lr in dict.fromkeys(found.lr))
    lines = [
        f"  measured: {len(found.steps)} probes in {formats}, steps {found.steps[0]} to "
        f"{found.steps[-1]} of {found.of_steps}, learning rate {rate}"
    ]
    if (lowest := found.schedule_lr[0]) < found.lr[0]:
        lines.append(f"  the schedule goes down to {lowest:g}: more updates are lost there")
    if found.left_out:
        lines.append(f"  {len(found.left_out)} probes of skipped updates left out")
    return lines + [f"  doubtful: {problem}" for problem in found.problems]


def _masters(advice: Advice) -> list[str]:
    found = advice.master_weights
    last = f"  updates that are zero in FP32 too, not counted: {percent(found.zero_share)}"
    if found.applied is not None:
        part = f"{found.applied:.4g} of their wanted updates (1: all)"
        last = f"  this run's 16-bit weights took {part}"
    if found.needed is None:
        how = "its stores are stochastic or compensated"
        if found.applied is None and not found.zero_share < 1:
            how = "every update was zero" if found.zero_share == 1 else "no update was measured"
        lines = [f"master weights: cannot be told from this run, {how}"]
        return lines if found.applied is None else [*lines, last]
    return [
        f"master weights: {'needed' if found.needed else 'not needed at this learning rate'}",
        *(
            f"  {format.upper()} weights would lose {percent(share)} of the non-zero updates"
            f"{_worst(found.worst[format])}"
            for format, share in found.share.items()
        ),
        f"  needed above {percent(found.threshold)}, in total or in one module: weights that lose "
        "their updates stand still",
        last,
    ]


def _scaling(advice: Advice) -> list[str]:
    found, scales = advice.loss_scaling, advice.loss_scaling.range
    if scales is None:
        return ["loss scaling: cannot be told, every gradient was zero"]
    needed = "needed" if found.needed else "not needed, scale 1 is in the range"
    lines, share = [f"loss scaling: {needed}"], percent(scales.share)
    for one in found.kinds:
        if math.isnan(one.lost):
            lines.append(f"  {words(one.kind)}: every one was zero")
            continue
        enough = f"; 2^{one.lowest} brings it to {share}" if (one.lowest or 0) > 0 else ""
        lines += [
            f"  {words(one.kind)}: {percent(one.lost)} of the non-zero underflow at scale 1"
            f"{_worst(one.worst)}",
            f"    ({percent(one.lost_sum)} of their sum){enough}; true zeros, which no scale "
            f"changes: {percent(one.zero_share)}",
        ]
    overflow = f"overflow from 2^{scales.highest + 1} on"
    if found.limited_by is not None:
        kind, module, largest = found.limited_by
        overflow += f" ({words(kind)} of {module}, {largest:.3g})"
    spare = f"{scales.headroom} powers of two to spare"
    if scales.fits:
        alone = scales.lowest == scales.top
        span = f" 2^{scales.top} alone" if alone else f"s 2^{scales.lowest} to 2^{scales.top}"
        lines += [f"  static scale{span}: at most {share} lost,", f"    {spare}; {overflow}"]
    else:
        lines += [
            f"  no static scale loses at most {share} with {spare}:",
            f"    that takes 2^{scales.lowest} or more; {overflow}",
            "    what is left underflows in FP16; BF16 has the range (bf16_master)",
        ]
    known = [one for one in found.kinds if not math.isnan(one.lost_recommended)]
    left = max(known, key=lambda one: one.lost_recommended)
    return [
        *lines,
        f"  recommended 2^{scales.recommended} = {2.0**scales.recommended:g}: "
        f"{percent(left.lost_recommended)} of {words(left.kind)} still underflow"
        f"{_worst(left.worst_recommended)}",
        f"  dynamic instead: {' '.join(advice.dynamic[1:4])}",
    ]


def _fp32(advice: Advice) -> list[str]:
    lines = ["keep in FP32"]
    for one in advice.keep_fp32:
        values = " ".join(f"precision.overrides.{p}=fp32" for p in one.patterns)
        amp = " (precision=amp)" if one.needs_amp else ""
        lines += [f"  {one.module}: {one.reason}", f"    {values}{amp}"]
    if not advice.keep_fp32:
        lines[0] += ": norm layers, loss and softmax, as the modes do"
        if (largest := advice.largest_activation) is not None:
            lines.append(f"  largest activation {largest[1]:.3g} in {largest[0]}")
    lines += [f"  first step with {mode}: {far.in_words()}" for mode, far in advice.far.items()]
    return lines + [f"  {note}" for note in advice.notes]


def _casts(advice: Advice, width: int | None, hint: str) -> list[str]:
    found = advice.casts
    if found is None:
        return [f"casts of a mode, measured: {hint}"]
    mode = " ".join(found.mode) or "this mode"
    lines = [f"casts of {mode}, {found.steps} steps: where each layer loses most, in %"]
    order = verdicts(found.losses)
    head = ("layer", "operand", "for", "zero", "clipped", "off")
    rows: list[tuple[str, ...]] = [head]
    for one in order[:_LAYERS]:
        (product, operand), loss = one.place, one.loss
        cells = f"{100 * loss.flushed:.1f}", f"{100 * loss.clipped:.1f}"
        off = f"{100 * loss.worse.off:.1f}"
        rows.append((one.name, operand.replace("grad_output", "gradient"), product, *cells, off))
    lines += [f"  {line}" for line in aligned(rows, head[:3], width)]
    if len(order) > _LAYERS:
        lines.append(f"  and {len(order) - _LAYERS} more (--json)")
    lines.append("  off: how far rows or columns of the product change, on average and beyond")
    lines.append(f"    chance; beyond {percent(OFF_THRESHOLD)} the layer is left out")
    lines += [f"  not {'; '.join(in_words(one, found.matmul))}" for one in order if not one.suits]
    changes = cast_changes(found.matmul, found.losses)
    values = [
        " ".join(f"{key}={value}" for key, value in change.items())
        for change in changes
        if all(isinstance(value, str) for value in change.values())
    ]
    lines += [f"  instead: {' or '.join(values)}"] if values else []
    return lines if found.overrides else [*lines, "  no layer is left"]


def _worst(worst: Worst | None) -> str:
    if worst is None or worst.share == 0:
        return ""
    return f" (worst: {worst.module} {percent(worst.share)})"
