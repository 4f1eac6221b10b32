"""The table of a sweep against records written by hand."""

from collections import Counter
from itertools import product

from mprun.config.compose import compose_config
from mprun.sweeps.jobs import Cell
from mprun.sweeps.mode_table import table, without_record


def run(mode, seed, loss, **more):
    memory = {"peak_bytes": 3 * 2**20, "measure": "test", "activation_bytes": 2**20}
    record = {"status": "done", "seed": seed, "sample": "token", "memory": memory}
    record |= {"overrides": [f"precision={mode}", f"seed={seed}"], "final": {"loss": loss}}
    record |= {"precision": {"mode": mode, "scaler": "none"}, "last_step": 10, "skipped": 0}
    return record | {"throughput": {"samples_per_s": 1000.0 * (seed + 1)}} | more


def rows(*runs, swept=()) -> dict[str, dict[str, str]]:
    """Mode -> column -> cell."""
    lines = [line for line in table(runs, swept).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[1:]}


def test_values_worked_by_hand():
    amp = {"precision": {"mode": "amp", "scaler": "dynamic"}}
    runs = [run("amp", 0, 2.2, skipped=3, **amp), run("amp", 1, 3.0, skipped=4, **amp)]
    found = rows(*runs, run("fp32", 0, 2.0), run("fp32", 1, 4.0))
    assert list(found) == ["fp32", "amp"]  # the baseline first, whatever the order of the runs
    assert found["fp32"]["vs FP32"] == "baseline"
    assert (found["fp32"]["loss, seed 0"], found["fp32"]["loss, seed 1"]) == ("2.0000", "4.0000")
    assert found["fp32"]["mean"] == "3.0000"
    # Means over the shared seeds: 2.6 / 3 - 1 = -13.33 %.
    assert (found["amp"]["mean"], found["amp"]["vs FP32"]) == ("2.6000", "-13.33 %")
    assert (found["amp"]["skipped"], found["amp"]["status"]) == ("7", "done")
    # Median of 1,000 and 2,000; the largest memory.
    assert found["amp"]["tokens/s"] == "1,500"
    assert (found["amp"]["act. MiB"], found["amp"]["peak MiB"]) == ("1.0", "3")


def test_speed_that_emulation_made_is_marked_and_left_out_where_every_mode_is_emulated():
    def amp(how):
        return run("amp", 0, 2.2, precision={"mode": "amp", "scaler": "none", "half_products": how})

    base, emulated, native = run("fp32", 0, 2.0), amp("emulated-fp16"), amp("native-fp16")
    assert rows(base, native)["amp"]["tokens/s"] == "1,000"
    bf16 = run("bf16_naive", 0, 2.0)
    bf16["precision"]["half_products"] = "native-bf16"
    both = rows(base, emulated, bf16)
    assert both["amp"]["tokens/s"] == "1,000 (emulated)"
    assert both["bf16_naive"]["tokens/s"] == "1,000"
    assert both["amp"]["peak MiB"] == "3 (emulated)" and both["amp"]["act. MiB"] == "1.0"
    # A cell that never started says nothing of how it would have computed.
    text = table([base, emulated, run("fp16_naive", 0, 2.0)])
    assert "tokens/s" not in text and "peak MiB" not in text and "act. MiB" in text
    assert "speed and peak memory left out, they would be the emulation's" in text


def test_zero_has_no_sign_and_equal_losses_are_said_to_be_identical():
    found = rows(run("fp32", 0, 2.0), run("amp", 0, 2.0), run("tf32", 0, 2.0 - 1e-9))
    assert (found["amp"]["vs FP32"], found["tf32"]["vs FP32"]) == ("0 (identical)", "0.00 %")


def test_a_diverged_run_shows_its_step_and_no_number():
    found = rows(
        *(run(mode, seed, 2.0) for mode, seed in (("fp32", 0), ("fp32", 1), ("fp16_master", 0))),
        run("fp16_naive", 0, "nan", status="diverged", last_step=4),
        run("fp16_naive", 1, "inf", status="diverged", last_step=9),
        run("fp16_master", 1, 0, final={}, status="failed"),
    )
    naive = found["fp16_naive"]
    assert (naive["loss, seed 0"], naive["loss, seed 1"]) == ("nan", "inf")
    assert (naive["vs FP32"], naive["status"]) == ("not finite", "diverged at step 4-9")
    assert found["fp16_master"]["status"] == "1 done, 1 failed"


def test_only_final_evaluations_are_shown_and_missing_seeds_are_counted():
    # The loss of a checkpoint's evaluation, with which a stopped run is recorded, is not its last.
    stopped = {"final": {"loss": 5.35}, "status": "preempted"}
    ended = [run("fp32", 0, 2.0), run("fp32", 1, 4.0), run("amp", 0, 3.0)]
    others = (("amp", 1), ("bf16_master", 0), ("bf16_master", 1))
    found = rows(*ended, *(run(mode, seed, 0, **stopped) for mode, seed in others))
    assert found["fp32"]["mean"] == "3.0000" and found["amp"]["loss, seed 1"] == ""
    assert found["amp"]["mean"] == "3.0000 (1 of 2 seeds)"
    assert found["amp"]["vs FP32"] == "+50.00 % (seed 0)"
    assert found["amp"]["status"] == "1 done, 1 preempted"
    none = found["bf16_master"]
    assert (none["loss, seed 1"], none["mean"], none["vs FP32"]) == ("", "", "")


def test_without_a_baseline_there_is_no_difference():
    found = rows(run("amp", 0, 2.0), run("bf16_master", 0, 2.0))
    assert {row["vs FP32"] for row in found.values()} == {"no baseline loss"}


def test_the_baseline_is_the_mode_that_the_configuration_names():
    config = {"config": {"compare": {"baseline": "amp_bf16"}}}
    static = {"precision": {"mode": "amp_bf16", "scaler": "static", "usual_scaler": "none"}}
    usual = {"precision": {"mode": "amp_bf16", "scaler": "none", "usual_scaler": "none"}}
    found = rows(
        run("fp32", 0, 2.2, **config),
        run("amp_bf16", 0, 1.0, **config, **static),
        run("amp_bf16", 0, 2.0, **config, **usual),
    )
    assert list(found) == ["amp_bf16 (none)", "fp32", "amp_bf16 (static)"]
    told = [row["vs amp_bf16"] for row in found.values()]
    assert told == ["baseline", "+10.00 %", "-50.00 %"]


def test_only_seeds_that_both_have_are_compared():
    base = [run("fp32", 0, 2.0), run("fp32", 1, 8.0)]
    found = rows(*base, run("amp", 1, 4.0), run("amp", 2, 1.0))
    assert found["amp"]["vs FP32"] == "-50.00 % (seed 1)"
    assert found["amp"]["loss, seed 0"] == "" and found["amp"]["mean"] == "2.5000 (2 of 3 seeds)"


def test_several_scalers_of_one_mode_are_rows_of_their_own():
    runs = [run("fp32", 0, 2.0)]
    for scaler, loss in (("dynamic", 2.0), ("static", 3.0)):
        precision = {"mode": "amp", "scaler": scaler}
        overrides = ["precision=amp", f"scaler={scaler}", "seed=0"]
        runs.append(run("amp", 0, loss, precision=precision, overrides=overrides))
    found = rows(*runs)
    assert list(found) == ["fp32", "amp (dynamic)", "amp (static)"]
    assert found["amp (static)"]["vs FP32"] == "+50.00 %"


def test_what_else_is_swept_separates_groups_with_baselines_of_their_own():
    runs = []
    for lr, base, other in (("0.1", 2.0, 3.0), ("0.2", 4.0, 4.0)):
        for mode, loss in (("fp32", base), ("amp", other)):
            runs.append(run(mode, 0, loss, overrides=[f"precision={mode}", f"optim.lr={lr}"]))
    found = rows(*runs)
    assert found["amp optim.lr=0.1"]["vs FP32"] == "+50.00 %"
    assert found["amp optim.lr=0.2"]["vs FP32"] == "0 (identical)"


def test_values_of_a_mode_separate_rows_but_not_from_their_baseline():
    """Values that the name of the mode already contains are not repeated."""
    key = "precision.update.state_dtype"
    narrow = {"precision": {"mode": "mxfp8+update.state_dtype=dynamic8", "scaler": "none"}}
    runs = [
        run("fp32", 0, 2.0, overrides=["precision=fp32", f"{key}=null"]),
        run("mxfp8", 0, 2.2, overrides=["precision=mxfp8", f"{key}=dynamic8"], **narrow),
    ]
    found = rows(*runs, swept=[key])
    assert found[f"fp32 {key}=null"]["vs FP32"] == "baseline"
    assert found["mxfp8+update.state_dtype=dynamic8"]["vs FP32"] == "+10.00 %"


def test_layers_chosen_for_products_that_a_mode_lacks_are_no_part_of_its_name():
    modules = "precision.matmul.modules=[output]"
    assert compose_config(["precision=fp32", modules]).mode == "fp32"
    assert compose_config(["precision=mxfp8", modules]).mode != "mxfp8"


def test_every_way_to_end_is_said_in_words(tmp_path):
    ends = {
        "amp": {"status": "failed", "cause": "RuntimeError: a\n| b"},
        "bf16_naive": {"status": "failed", "cause": "killed by SIGKILL"},
        "bf16_master": {"status": "failed", "cause": "hung: no progress for 9 s, killed"},
        "amp_bf16": {"status": "preempted", "cause": "hung: no progress for 9 s, stopped"},
        "tf32": {"status": "preempted", "cause": "SIGTERM"},
    }
    runs = [run(mode, 0, 0, final={}, **end) for mode, end in ends.items()]
    runs.append(run("fp32", 0, 2.0))
    words = "failed: out of memory: " + "9" * 200
    cell = Cell(("seed=1",), tmp_path / "s1", "0", mode="fp32", scaler="none", seed=1)
    runs.append(without_record(cell, words))
    text = table(runs).splitlines()
    status = {line.split()[1]: line for line in text if line.startswith("| ")}
    assert "| failed: RuntimeError: a \\| b " in status["amp"]
    assert "| killed by SIGKILL " in status["bf16_naive"]
    assert "| hung: no progress for 9 s, killed " in status["bf16_master"]
    assert "| hung: no progress for 9 s, stopped " in status["amp_bf16"]
    assert "| preempted " in status["tf32"]
    assert "| 1 done, 1 failed: out of memory: ... |" in status["fp32"]
    assert max(map(len, text)) < 300


def test_incidental_keys_separate_where_they_are_swept():
    runs = [
        run(mode, 0, 2.0, overrides=["model=x", f"precision={mode}", f"device={device}"])
        for mode, device in product(("fp32", "amp"), ("cpu", "cuda"))
    ]
    assert list(rows(*runs)) == ["fp32", "amp"]
    # What all rows have in common is not repeated in each of them.
    expected = [f"{mode} device={device}" for device in ("cpu", "cuda") for mode in ("fp32", "amp")]
    assert list(rows(*runs, swept=["device"])) == expected


def test_no_run():
    assert table([]) == "no run has started"


def test_a_terminal_gets_a_table_that_fits_with_every_number():
    runs = [run(m, seed, 2.0 + seed) for m in ("fp32", "fp16_master_scaled") for seed in range(5)]
    lines = table(runs, width=80).splitlines()
    assert max(map(len, lines)) <= 80 < max(map(len, table(runs).splitlines()))
    given = [word for word in table(runs).split() if word.strip("|-")]
    assert not Counter(given) - Counter(" ".join(lines).split())
