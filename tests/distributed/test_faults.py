"""A run of two ranks, one of which meets a fault: exit code, record, time, orphans."""

import time

import pytest

from ..helpers import record_of
from .processes import mprun, with_word

TIMEOUT_S = 8  # dist.timeout_s; of a rank that is gone without a word the others know sooner
# Kind -> exit code, status, words of the cause. Before its first step a run has no record, a
# signal leaves nothing to go on with, and what a factory raises is bad input.
WANTED = {
    "inf": (0, "done", None),
    "nan": (3, "diverged", "non-finite loss"),
    "signal": (75, "preempted", "SIGTERM"),
    "damaged": (4, "failed", "rank 1: images/0001.png: cut short"),
    "exception": (1, "failed", "rank 1: KeyError: 'nobody expected this'"),
    "killed": (5, "failed", "rank 1 was killed (SIGKILL)"),
    "stopped": (5, "failed", "rank 1: no answer for 8 s"),
    "hung": (5, "failed", "rank 1: no answer for 8 s"),
    "memory": (5, "failed", "rank 1: out of memory"),
}
BEFORE = {"exception": 2}


def faulty(fault, tmp_path):
    """The environment in which rank 1 meets KIND:PHASE."""
    return {"FAULT": fault, "FAULT_AT": str(tmp_path / "at")}


def arguments_of(kind, directory):
    # A NaN is skipped with a loss scale, and diverges without.
    mode = ["precision=fp32"] if kind == "nan" else ["precision=fp16_master_scaled"]
    return [
        *("devices=2", "device=cpu", "threads=1", "model=custom", "data=custom", *mode),
        "model.factory=tests.distributed.of_a_rank:small",
        "data.factory=tests.distributed.faulty:digits",
        *(["scaler.init_scale=1024"] if kind != "nan" else []),
        *("train.accumulate=2", "train.steps=12", "train.eval_every=6", "data.batch_size=8"),
        *(f"dist.timeout_s={TIMEOUT_S}", f"output_dir={directory}"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["start", "training", "evaluation"])
@pytest.mark.parametrize("kind", WANTED)
def test_every_fault_in_every_phase(kind, phase, tmp_path):
    directory = tmp_path / "run"
    ended = mprun(*arguments_of(kind, directory), **faulty(f"{kind}:{phase}", tmp_path))
    seconds = time.time() - (tmp_path / "at").stat().st_mtime
    code, status, cause = WANTED[kind]
    if phase == "evaluation" and kind in ("inf", "nan"):
        code, status, cause = 3, "diverged", "non-finite evaluation loss"
    before = phase == "start" and kind not in ("inf", "nan")
    assert ended.returncode == (BEFORE.get(kind, code) if before else code), ended.stderr
    if kind not in ("inf", "nan", "signal"):
        # Nobody would end the others; seconds on a free machine, more where others compute.
        assert seconds < 60
        assert "rank 1" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert with_word(f"output_dir={directory}") == []
    if before:
        assert not directory.exists()
        return
    record = record_of(directory)
    assert record["status"] == status
    assert (record["cause"] or "").startswith(cause or "")
    assert record["last_step"] > 0
    kept = [log.name for log in directory.glob("ranks/*")]
    assert kept == (["rank-00001.log"] if status == "failed" else [])
    if kind == "inf" and phase != "evaluation":
        assert record["skipped"] == 1
