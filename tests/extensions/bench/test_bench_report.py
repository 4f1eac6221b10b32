"""Summary, tables and figure from rows that are written down, without measuring."""

import pytest

from mprun.extensions.bench.report import markdown, write_figure
from mprun.extensions.bench.summary import summarise

from .bench_rows import bench, lines_of, row, window


def test_ratios_pair_windows_of_one_round():
    """AMP is 4 times FP32 in each round although the clock drifts by half."""
    rows = [row("fp32", "mprun", [1000, 1200, 1500]), row("amp", "mprun", [4000, 4800, 6000])]
    summarise(rows)
    found = rows[1]["summary"]
    assert found["rate"] == {"median": 4800.0, "q1": 4400.0, "q3": 5400.0, "n": 3}
    to_fp32 = found["ratios"]["fp32"]
    assert (to_fp32["median"], to_fp32["low"], to_fp32["high"]) == pytest.approx((4, 4, 4))
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
            limit={"limit": 8000.0},
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


def test_the_figure_needs_something_that_was_timed(tmp_path):
    path = tmp_path / "bench.png"
    write_figure(path, bench([row("amp", "loop", [])]))
    assert not path.exists()
    rows = [row("fp32", "mprun", [1.0, 2.0]), row("amp", "mprun", [4.0, 4.1], label="LM b16")]
    write_figure(path, bench(rows))
    assert path.read_bytes().startswith(b"\x89PNG")
