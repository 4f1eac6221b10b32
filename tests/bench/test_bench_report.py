"""Summary, targets, tables and figure from rows that are written down, without measuring."""

import pytest

from mprun.bench.figure import write_figure
from mprun.bench.report import markdown
from mprun.bench.summary import summarise
from mprun.bench.targets import TARGETS, judge


def window(rate: float, number: int, cohort: int = 1, **more) -> dict:
    """256 images in 1/rate of 256 seconds."""
    return {
        "cohort": cohort,
        "round": number,
        "steps": 1,
        "samples": 256,
        "seconds": 256 / rate,
        "energy_mj": None,
        "sensors": {},
        "data_wait_s": None,
        "loss_is_finite": True,
    } | more


def row(mode, contender, rates, *, label="ResNet-50 b256", cohort=1, real=False, **more) -> dict:
    case = {"label": label, "mode": mode, "contender": contender, "real_data": real}
    return {
        "key": f"{label} | {mode} | {contender}",
        "case": case,
        "status": "measured" if rates else "failed",
        "reason": "" if rates else "out of memory: tried to allocate 20 GiB",
        "kind": None if rates else "memory",
        "facts": {
            "build": {"sample": "image", "samples_per_step": 256},
            "prepare": {"first_use_s": 1.5, "flags": {"a": "ieee", "b": True}},
        },
        "equality": {"losses": [6.9], "skipped": 0, "ok": True, "reason": ""},
        "warm_up": {"steady": True, "apart": 0.01},
        "windows": [window(rate, number, cohort) for number, rate in enumerate(rates)],
        "details": {},
        "limit": {},
    } | more


def bench(rows: list[dict], **more) -> dict:
    summarise(rows)
    packages = {"torch": "2.11.0"}
    environment = {"dirty": True, "packages": packages, "mprun": "0.1.0", "commit": "abc"}
    environment |= {"python": "3.11", "platform": "Linux", "cpu": "a CPU", "cpu_count": 2}
    return {
        "device_name": "NVIDIA H200",
        "driver": "580.65",
        "created": "2026-01-01T00:00:00+00:00",
        "elapsed_s": 100.0,
        "ended": "complete",
        "options": {"budget_s": 540.0, "windows": 3},
        "nvml": {"energy": "nvmlInit_v2: Unknown Error"},
        "environment": environment,
        "ceilings": {"bandwidth": 4.3e12, "flops": {"fp16": 790e12}, "matmul_size": 8192},
        "left_out": [],
        "rows": rows,
        "targets": judge(rows),
    } | more


def lines_of(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_ratios_pair_windows_of_one_round():
    """AMP is 4 times FP32 in each round although the clock drifts by half; peers likewise."""
    rows = [
        row("fp32", "mprun", [1000, 1200, 1500]),
        row("amp", "mprun", [4000, 4800, 6000]),
        row("amp", "loop", [3200, 3840, 4800]),
        row("amp", "amp", [2000, 2000, 2000]),
    ]
    summarise(rows)
    found = rows[1]["summary"]
    assert found["rate"] == {"median": 4800.0, "q1": 4400.0, "q3": 5400.0, "n": 3}
    to_fp32 = found["ratios"]["fp32"]
    assert (to_fp32["median"], to_fp32["low"], to_fp32["high"]) == pytest.approx((4, 4, 4))
    best = found["ratios"]["best_peer"]
    assert best["peer"] == "loop" and best["median"] == pytest.approx(1.25) and best["paired"]
    assert "best_peer" not in rows[2]["summary"]["ratios"]
    assert "fp32" not in rows[0]["summary"]["ratios"]


@pytest.mark.parametrize(
    ("reason", "compared"),
    [
        ("off: Adam without a fused kernel counts its steps on the host", False),
        ("off: the device is the limit, 50 ms a step of which the host needs 20", True),
    ],
)
def test_a_replayed_mode_is_not_held_to_one_that_cannot_be(reason, compared):
    """A naive 16-bit mode with Adam has no graph: its ratio would be that of eager to replayed."""
    eager = {"first_use_s": 1.5, "replays": False, "settings": {"cuda_graph": reason}, "flags": {}}
    graph = eager | {"replays": True, "settings": {"cuda_graph": "on"}}
    build = {"sample": "image", "samples_per_step": 128}
    rows = [
        row("fp32", "mprun", [9000.0] * 3, facts={"build": build, "prepare": graph}),
        row("fp16_naive", "mprun", [5000.0] * 3, facts={"build": build, "prepare": eager}),
    ]
    text = markdown(bench(rows))
    assert ("fp32" in rows[1]["summary"]["ratios"]) == compared
    (line,) = lines_of(text, "| fp16_naive", "images/s")
    assert ("no ratio to fp32: one is replayed, the other cannot be" in line) != compared


def test_a_mode_that_no_peer_has_is_held_to_the_nearest_one():
    rows = [row("fp16_master_scaled", "mprun", [4400.0]), row("amp", "amp+", [4000.0])]
    summarise(rows)
    assert rows[0]["summary"]["ratios"]["best_peer"]["peer"] == "amp+ (amp)"


def test_rows_that_were_never_alive_together_say_so():
    rows = [row("fp32", "mprun", [1000.0] * 3), row("amp", "mprun", [4000.0] * 3, cohort=2)]
    content = bench(rows)
    assert rows[1]["summary"]["ratios"]["fp32"]["paired"] is False
    (line,) = lines_of(markdown(content), "| amp", "images/s")
    assert "~4.000 [4.000, 4.000]" in line
    assert "ResNet-50 b256 in several cohorts" in markdown(content)


def test_energy_memory_and_the_share_of_the_limit_by_hand():
    """2,560 J for 2,560 images is 1 J an image; 60 of 100 bytes; 5,000 of 8,000 images/s."""
    long = window(5000, 0, energy_mj=2_560_000) | {"samples": 2560}
    kinds = {"parameters": {"float16": 20}, "activations": {"float16": 40}}
    base = {"memory_by_kind": {"parameters": {"float32": 40}, "activations": {"float32": 60}}}
    rows = [
        row("fp32", "mprun", [1000.0], details=base | {"peak": {"allocated": 200}}),
        row(
            "amp",
            "mprun",
            [5000.0],
            details={"memory_by_kind": kinds, "energy_window": long, "peak": {"allocated": 110}},
            limit={"eager": 8000.0},
        ),
    ]
    summarise(rows)
    found = rows[1]["summary"]
    assert found["energy_j"] == pytest.approx(1.0)
    assert (found["memory_bytes"], found["memory_ratio"]) == (60, 0.6)
    assert found["peak_ratio"] == pytest.approx(0.55)
    assert found["limit_share"] == pytest.approx(0.625)
    assert rows[0]["summary"]["energy_j"] is None


def test_the_tables_hold_every_row_or_say_why_not():
    rows = [
        row("fp32", "mprun", [1000.0, 1010.0, 1020.0]),
        row("amp", "mprun", [5000.0, 5000.0, 5000.0], warm_up={"steady": False, "apart": 0.05}),
        row("amp", "loop", []),
        row("fp32", "mprun", [900.0], real=True),
    ]
    rows[3]["windows"][0] |= {"data_wait_s": 0.1}
    left = {"label": "ResNet-50 b256", "contender": "timm", "reason": "not installed"}
    left_out = [left | {"mode": mode} for mode in ("fp32", "amp")]
    text = markdown(bench(rows, left_out=left_out))
    (line,) = lines_of(text, "| fp32", "1,010 [1,005, 1,015] images/s, n=3")
    (line,) = lines_of(text, "| amp", "5,000 [5,000, 5,000]")
    assert "4.950 [4.902, 5.000]" in line and "not steady: last windows 5.0 % apart" in line
    assert lines_of(text, "loop", "failed", "out of memory: tried to allocate 20 GiB")
    assert lines_of(text, "| fp32, amp", "timm", "left out", "not installed")
    # 0.1 s of 256 / 900 s.
    assert lines_of(text, "mprun (end to end)", "900 [900, 900]", "35 %")
    assert "Not readable: nvmlInit_v2: Unknown Error." in text
    assert lines_of(text, "fp16 product, 8192 cubed", "790.0 TFLOP/s")
    assert lines_of(text, "commit abc (with local changes)")
    assert "Flags of all modes: a=ieee, b=True" in text


def test_targets_are_judged_by_their_own_rows():
    """Of a rate the best row counts, of the ratio to peers the mode that does worst."""
    rows = [
        row("fp32", "mprun", [1200.0]),
        row("amp", "mprun", [4000.0]),
        row("amp_bf16", "mprun", [5000.0]),
        row("amp", "mprun+", [6100.0]),
        row("amp_bf16", "mprun+", [5500.0]),
        row("amp", "amp+", [6000.0]),
        row("amp_bf16", "amp+", [6000.0]),
    ]
    summarise(rows)
    judged = {(t["label"], t["what"]): t for t in judge(rows)}
    eager = judged["ResNet-50 b256", "eager"]
    assert (eager["value"], eager["row"], eager["outcome"]) == (5000, "amp_bf16, mprun", "reached")
    peers = judged["ResNet-50 b256", "against the best peer"]
    assert peers["value"] == pytest.approx(5500 / 6000) and peers["outcome"] == "missed"
    over = judged["ResNet-50 b256", "AMP over FP32"]
    assert over["value"] == pytest.approx(4000 / 1200) and over["outcome"] == "missed"
    assert judged["DCGAN b128", "rate"]["outcome"] == "not measured"
    assert judged["every model", "synchronisations per step"]["outcome"] == "not measured"
    assert len(judged) == len(TARGETS) + 1


def test_mprun_is_held_to_the_documented_recipe_in_rate_and_memory():
    """6,000 of 4,000 images/s; 95 of 100 bytes; without FP32 the peak is that over TF32."""
    rows = [
        row("tf32", "mprun", [2000.0], details={"peak": {"allocated": 190}}),
        row("amp", "amp", [4000.0], details={"peak": {"allocated": 100}}),
        row("amp", "mprun+", [6000.0], details={"peak": {"allocated": 120}}),
        row("fp16_master_scaled", "mprun", [4400.0], details={"peak": {"allocated": 95}}),
    ]
    summarise(rows)
    assert rows[2]["summary"]["ratios"]["recipe"]["median"] == pytest.approx(1.5)
    assert "recipe" not in rows[0]["summary"]["ratios"]
    assert rows[3]["summary"]["peak_ratio"] == pytest.approx(0.5)
    judged = {(t["label"], t["what"]): t for t in judge(rows)}
    memory = judged["ResNet-50 b256", "peak memory over the torch.amp recipe"]
    assert memory["value"] == pytest.approx(0.95) and memory["outcome"] == "reached"
    rate = judged["ResNet-50 b256", "over the torch.amp recipe"]
    assert rate["value"] == pytest.approx(1.5) and rate["row"] == "amp, mprun+"


def test_one_synchronisation_misses_the_target():
    rows = [
        row("amp", "mprun", [1.0], details={"synchronisations": 0}),
        row("fp32", "mprun", [1.0], details={"synchronisations": 0.2}),
        row("amp", "loop", [1.0], details={"synchronisations": 3}),
    ]
    summarise(rows)
    found = judge(rows)[-1]
    assert (found["value"], found["outcome"]) == (0.2, "missed")


def test_the_figure_needs_something_that_was_timed(tmp_path):
    path = tmp_path / "bench.png"
    assert not write_figure(path, bench([row("amp", "loop", [])]))
    assert not path.exists()
    rows = [row("fp32", "mprun", [1.0, 2.0]), row("amp", "mprun", [4.0, 4.1], label="LM b16")]
    assert write_figure(path, bench(rows))
    assert path.read_bytes().startswith(b"\x89PNG")
