"""The findings of `mprun advise` as about 30 lines."""

import shlex

from mprun.compare.wording import aligned
from mprun.extensions.diagnosis.advice import Advice, Worst, words
from mprun.extensions.diagnosis.cast_advice import cast_changes, in_words, percent
from mprun.extensions.diagnosis.casts import TAKEN_THRESHOLD, worst_place
from mprun.extensions.diagnosis.fp8 import OPERANDS
from mprun.extensions.diagnosis.shapes import MULTIPLE

_SHAPES = 6  # most lines of sizes; the rest is counted
_LAYERS = 8


def as_text(advice: Advice) -> list[str]:
    """Return lines for the console, without the last one."""
    parts = (_evidence, _masters, _scaling, _fp32, _shapes, _fp8, _casts)
    lines = [line for part in parts for line in part(advice)]
    lines += ["use it", f"  {advice.command}"]
    if advice.fp8.command:
        lines += ["or with FP8 products", f"  {advice.fp8.command}"]
    if advice.casts is not None and advice.casts.command:
        lines += [f"or with {' '.join(advice.casts.mode)}", f"  {advice.casts.command}"]
    return lines + (_check(advice.check) if advice.check else [])


def _check(check: dict) -> list[str]:
    lines = [
        f"check: {check['seeds']} seeds of {check['steps']} steps beside FP32 "
        f"({check['metric']} {check['baseline']:.5g}); brief, and no word on a whole run"
    ]
    for arm in check["arms"]:
        percent, difference = arm["difference_percent"], "no final value"
        if percent is not None:
            small = abs(percent) < 0.01
            difference = "within 0.01 % of FP32" if small else f"{percent:+.2f} % from FP32"
        skipped = f"    {difference}, {arm['skipped']} skipped updates"
        lines += [f"  {arm['name']}: {arm['overrides']}", skipped, f"    {arm['verdict']}"]
    return [*lines, f"  for the report: mprun compare {shlex.quote(check['folder'])}"]


def _evidence(advice: Advice) -> list[str]:
    found = advice.evidence
    formats = "+".join(found.formats).upper() or "no gradients"
    rate = " to ".join(f"{lr:g}" for lr in dict.fromkeys(found.lr))
    lines = [
        f"advice for FP16: {len(found.steps)} probes in {formats}, steps {found.steps[0]} to "
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
        lines = [f"1 master weights: cannot be told from this run, {how}"]
        return lines if found.applied is None else [*lines, last]
    return [
        f"1 master weights: {'needed' if found.needed else 'not needed at this learning rate'}",
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
        return ["2 loss scaling: cannot be told, every gradient was zero"]
    needed = "needed" if found.needed else "not needed, scale 1 is in the range"
    lines, share = [f"2 loss scaling: {needed}"], percent(scales.share)
    for one in found.kinds:
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
    left = max(found.kinds, key=lambda one: one.lost_recommended)
    return [
        *lines,
        f"  recommended 2^{scales.recommended} = {2.0**scales.recommended:g}: "
        f"{percent(left.lost_recommended)} of {words(left.kind)} still underflow"
        f"{_worst(left.worst_recommended)}",
        f"  dynamic instead: {' '.join(advice.dynamic[1:4])}",
    ]


def _fp32(advice: Advice) -> list[str]:
    lines = ["3 keep in FP32"]
    for one in advice.keep_fp32:
        values = " ".join(f"precision.overrides.{p}=fp32" for p in one.patterns)
        amp = " (precision=amp)" if one.needs_amp else ""
        lines += [f"  {one.module}: {one.reason}", f"    {values}{amp}"]
    if not advice.keep_fp32:
        largest = advice.largest_activation
        of = "" if largest is None else f"; largest activation {largest[1]:.3g} in {largest[0]}"
        lines[0] += f": norm layers, loss and softmax, as the modes do{of}"
    return lines + [f"  {note}" for note in advice.notes]


def _shapes(advice: Advice) -> list[str]:
    found = sorted(advice.idle_shapes, key=lambda shape: shape.usual)
    if not found:
        return [f"4 shapes for Tensor Cores: all sizes are multiples of {MULTIPLE}"]
    odd = sum(not shape.usual for shape in found)
    counts = {"to look at": odd, "as usual": len(found) - odd}
    count = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    lines = [f"4 shapes for Tensor Cores, sizes that are no multiple of {MULTIPLE}: {count}"]
    for shape in found[:_SHAPES]:
        module = f"{shape.module}: " if shape.module else ""
        end = f" -> {shape.remedy}" if shape.remedy else " (usual)" if shape.usual else ""
        lines.append(f"  {module}{shape.dimension} {shape.size}{end}")
    more = len(found) - _SHAPES
    return [*lines, f"  and {more} more (--json)"] if more > 0 else lines


def _fp8(advice: Advice) -> list[str]:
    found = advice.fp8
    count = len(found.layers)
    if not count:
        why = f"the probes lack {found.unmeasured[0]}" if found.unmeasured else "there is none"
        return [f"5 FP8 products of linear layers, without that of the output: {why}"]
    fit, bound = f"{count - len(found.excluded)} of {count}", percent(found.threshold)
    head = f"5 FP8 products: tensor-wise scales suit {fit} linear layers"
    lines = [f"{head}; flushed to zero, worst layer"]
    for operand, (_, format) in OPERANDS.items():
        name, share = found.worst(operand, "most")
        bare, zero = found.worst(operand, "unscaled")
        _, high = found.worst(operand, "saturated")
        over = f", above {format.largest:g} {percent(high)}" if high else ""
        lines.append(
            f"  {operand} ({format.name.upper()}): at most {percent(share)} ({name}); "
            f"unscaled {percent(zero)} ({bare}){over}"
        )
    for name in found.excluded:
        shares = {operand: one.most for operand, one in found.layers[name].items()}
        above = [f"{o} {percent(s)}" for o, s in shares.items() if s > found.threshold]
        lines.append(f"  not {name}: {', '.join(above)}; above {bound}")
    if found.unmeasured:
        lines.append(f"  not probed, left out: {', '.join(found.unmeasured)}")
    name, share = found.worst("output gradient", "unscaled")
    if share > found.threshold:
        power = found.loss_scale
        what = "no loss scale brings" if power is None else f"a loss scale of 2^{power} brings"
        lines.append(f"  without scales of tensors, {what} output gradients to {bound}")
    return lines


def _casts(advice: Advice) -> list[str]:
    found = advice.casts
    if found is None:
        return [
            "6 casts of a mode, measured: mprun advise KEY=VALUE ... precision=nvfp4 (or other)"
        ]
    mode = " ".join(found.mode) or "this mode"
    lines = [f"6 casts of {mode}, {found.steps} steps: where each layer loses most, in %"]
    places = {name: worst_place(own) for name, own in found.losses.items()}
    order = sorted(places, key=lambda name: -found.losses[name][places[name]].rank)
    head = ("layer", "operand", "for", "zero", "clipped", "error", "taken")
    rows: list[tuple[str, ...]] = [head]
    for name in order[:_LAYERS]:
        (product, operand), loss = places[name], found.losses[name][places[name]]
        shares = (loss.flushed, loss.clipped, loss.error, loss.taken)
        cells = (f"{100 * share:.1f}" for share in shares)
        rows.append((name, operand.replace("grad_output", "gradient"), product, *cells))
    lines += [f"  {line}" for line in aligned(rows, head[:3])]
    if len(order) > _LAYERS:
        lines.append(f"  and {len(order) - _LAYERS} more (--json)")
    bound = percent(TAKEN_THRESHOLD)
    lines.append(f"  taken: of the sum of magnitudes, by rounding; above {bound} it is left out")
    for name in found.excluded:
        lines.append(f"  not {'; '.join(in_words(name, found.losses[name], found.products))}")
    changes = cast_changes(found.products, found.losses)
    values = [f"{k}={v}" for change in changes for k, v in change.items() if isinstance(v, str)]
    lines += [f"  instead: {' or '.join(values)}"] if values else []
    return lines if found.overrides else [*lines, "  no layer is left"]


def _worst(worst: Worst | None) -> str:
    if worst is None or worst.share == 0:
        return ""
    return f" (worst: {worst.module} {percent(worst.share)})"
