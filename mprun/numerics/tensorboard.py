"""Probes in TensorBoard: histograms over exponents for whole models, scalars per module."""

import math

from mprun.numerics.probe_record import KINDS, LearnerProbe, ProbeRecord, TensorStats


def show_probe(writer, record: ProbeRecord) -> None:
    """Add one probe to the SummaryWriter at its step.

    Histograms `exponents/KIND`: the binary exponents of all non-zero finite values, one bucket
    each. Scalars KIND_underflow, KIND_overflow (shares in FP16, of the non-zero values), KIND_zeros
    (share of all), KIND_log2_amax and KIND_headroom (powers of two), lost_updates_fp16 and
    lost_updates_bf16 (shares), shadow_cosine, shadow_norm_ratio and shadow_relative_error, each
    `/total` and `/MODULE`. Behind the slash a GAN has the learner first.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = []
    for learner, measured in record.learners.items():
        prefix = f"{learner}." if len(record.learners) > 1 else ""
        for kind in KINDS:
            total = measured.total(kind)
            if total is not None and total.counts.nonzero:
                values += _histogram(f"exponents/{prefix}{kind}", total).value
        for tag, name, value in _scalars(measured):
            if math.isfinite(value):
                values.append(Summary.Value(tag=f"{tag}/{prefix}{name}", simple_value=value))
    # In one event: some hundred modules with a call each would take longer than a training step.
    writer.file_writer.add_summary(Summary(value=values), record.step)


def _scalars(measured: LearnerProbe):
    """(tag, module or "total", value) of all that is shown as a curve."""
    for kind in KINDS:
        total = measured.total(kind)
        if total is not None:
            for name, stats in {"total": total, **measured.tensors[kind]}.items():
                shares, headroom = stats.counts.shares(), stats.headroom
                yield f"{kind}_underflow", name, shares.underflow
                yield f"{kind}_overflow", name, shares.overflow
                yield f"{kind}_zeros", name, stats.counts.zeros / stats.counts.total
                yield f"{kind}_log2_amax", name, math.log2(stats.amax) if stats.amax else math.nan
                yield f"{kind}_headroom", name, math.nan if headroom is None else headroom
    if measured.lost_updates:
        for name, lost in {"total": measured.total_lost(), **measured.lost_updates}.items():
            yield "lost_updates_fp16", name, lost.share("fp16")
            yield "lost_updates_bf16", name, lost.share("bf16")
    if measured.shadow:
        for name, sums in {"total": measured.total_agreement(), **measured.shadow}.items():
            yield "shadow_cosine", name, sums.cosine
            yield "shadow_norm_ratio", name, sums.norm_ratio
            yield "shadow_relative_error", name, sums.relative_error


def _histogram(tag: str, stats: TensorStats):
    by_exponent = stats.counts.by_exponent()
    from torch.utils.tensorboard.summary import histogram_raw

    low, high = min(by_exponent), max(by_exponent)
    counts = [by_exponent.get(exponent, 0) for exponent in range(low, high + 1)]
    middles = [exponent + 0.5 for exponent in range(low, high + 1)]
    return histogram_raw(
        tag,
        float(low),
        float(high + 1),
        sum(counts),
        sum(c * m for c, m in zip(counts, middles, strict=True)),
        sum(c * m * m for c, m in zip(counts, middles, strict=True)),
        [float(exponent + 1) for exponent in range(low, high + 1)],
        counts,
    )
