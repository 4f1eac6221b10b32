"""Logs in the form in which other tools write them, a few lines of each.

keras0.csv, summary.csv, trainer_state.json, history.json and MLflow's files are excerpts of what
Keras 3.15, timm 1.0, transformers 5.23 and MLflow 3.17 wrote; the others are in the same form by
hand (Weights & Biases' export, ultralytics 8, torchtitan, Megatron, MLPerf, nanoGPT).
"""

import gzip
import json
import struct
import zlib

import numpy as np
import pytest

from mprun.entry_points import announced
from mprun.errors import BadInput, Damaged
from mprun.extensions.logs import binary_logs
from mprun.extensions.logs.external_logs import load_foreign
from mprun.extensions.logs.log_formats import read_logs
from mprun.extensions.logs.wanted import Wanted

from ...helpers import raises_line
from .test_foreign import write_events

MEGATRON = (
    " [2026-01-01 00:00:0{s}] iteration        {s}/     100 | consumed samples:           32 | "
    "elapsed time per iteration (ms): 9.1 | learning rate: 1.0E-06 | lm loss: {v:.6E} | "
    "loss scale: 1.0 | grad norm: 2.1 |"
)
TITAN = (
    "\x1b[31m[rank0]:[titan] 2026-01-01 00:00:00,0{s} - root - INFO - \x1b[31mstep:  {s}  "
    "\x1b[32mloss:  {v:.5f}  \x1b[33mgrad_norm:  1.2000  memory: 0.93GiB(1.2%)  tps: 3,111\x1b[0m"
)
MLPERF = ':::MLLOG {{"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", "key": '
MLPERF += '"eval_accuracy", "value": {v}, "metadata": {{"file": "a.py", "epoch_num": {s}}}}}'
VALUES = (0.5, 0.25)
NOW = 1795359040745  # ms since 1970


def lines(form: str, before: str = "", after: str = "") -> str:
    return before + "".join(form.format(s=s, v=v) + "\n" for s, v in enumerate(VALUES, 1)) + after


STATE = {
    "best_metric": None,
    "global_step": 2,
    "log_history": [
        {"epoch": 0.5, "grad_norm": 1.0, "loss": 0.5, "step": 1},
        {"epoch": 1.0, "eval_loss": 9.0, "step": 1},
        {"epoch": 1.0, "grad_norm": 1.0, "loss": 0.25, "step": 2},
    ],
}
GOLDEN = {
    "lm loss": {"start_step": 1, "end_step": 2, "step_interval": 1, "values": {"1": 0.5, "2": 0.25}}
}
SACRED = {  # FileStorageObserver.log_metrics
    "loss": {"steps": [1, 2], "timestamps": ["2026-01-01T00:00:00"] * 2, "values": VALUES}
}
# fairseq's SimpleProgressBar and JsonProgressBar, below a Python and a Hydra logger.
SIMPLE = (
    "2026-01-01 00:00:00 | INFO | train_inner | epoch 001:      {s} / 2 loss={v}, ppl=2, "
    "num_updates={s}, lr=0.1\n2026-01-01 00:00:00 | INFO | valid | epoch 00{s} | valid on 'valid' "
    "subset | loss 1{v} | num_updates {s}\n2026-01-01 00:00:00 | INFO | train | epoch 00{s} | "
    "loss 2{v} | ppl 2 | num_updates {s} | lr 0.1"
)
AS_JSON = (
    '[2026-01-01 00:00:00,123][train_inner][INFO] - {{"epoch": 1, "update": 0.5, "loss": "{v}", '
    '"num_updates": "{s}"}}\n[2026-01-01 00:00:00,123][valid][INFO] - {{"epoch": {s}, '
    '"valid_loss": "9", "valid_num_updates": "{s}"}}'
)
LLMC = "s:{s} tel:9.0000\ns:{s} eval:0.2500\ns:{s} trl:{v:.6f} lr:0.000600 norm:1.2300"
BOTH = '{{"split": "train", "step": {s}, "loss": 9}}\n{{"split": "eval", "step": {s}, "loss": {v}}}'


@pytest.mark.parametrize(
    ("name", "text", "scalar", "steps"),
    [
        ("keras0.csv", lines("{s},0.6,{v}", "epoch,accuracy,loss\n"), "loss", "epoch"),
        ("keras0.csv", lines("{s};0.6;{v}", "epoch;accuracy;loss\n"), "loss", "epoch"),
        ("keras0.csv", lines("{s}\t0.6\t{v}", "epoch\taccuracy\tloss\n"), "loss", "epoch"),
        ("tensorboard.csv", lines("1.5,{s},{v}", "Wall time,Step,Value\n"), "anything", "Step"),
        ("gaps.csv", "\ufeffepoch,step,val,loss\r\n0,1,,0.5\r\n0,1,3,\r\n\r\n0,2,,0.25\r\n",
         "loss", "step"),
        ("history.json", json.dumps({"accuracy": [0.6, 0.6], "loss": VALUES}), "loss", ""),
        ("summary.csv", lines("{s},3.0,{v},70.0,0.1", "epoch,train_loss,eval_loss,eval_top1,lr\n"),
         "eval_loss", "epoch"),
        ("results.csv", lines("{s:>23},{v:>23},{v:>23}",
         f"{'epoch':>23},{'train/box_loss':>23},{'metrics/mAP50(B)':>23}\n"),
         "train/box_loss", "epoch"),
        ("trainer_state.json", json.dumps(STATE, indent=2), "loss", "step"),
        ("a.jsonl", lines('{{"iter": {s}, "loss": {v}}}', '{"iter": 0}\n'), "loss", "iter"),
        ("a.json", json.dumps([{"step": s, "eval": {"loss": v}} for s, v in enumerate(VALUES, 1)]),
         "eval.loss", "step"),
        ("golden_values.json", json.dumps(GOLDEN), "lm loss", "step"),
        ("run.log", "Train: step 1 | loss 0.5\nTrain: step 2 | val loss 9.1 | loss 0.25\n"
         'done: {"loss": 0.1, "step": 2}\n', "loss", "step"),
        ("metrics/loss", lines(f"{NOW} {{v}} {{s}} corpus 1f2e3d4c"), "loss", "step"),
        ("metrics.json", json.dumps(SACRED), "loss", "step"),
        ("history.json", json.dumps({"steps": [1, 2], "loss": VALUES}), "loss", "steps"),
        ("run.log", lines(SIMPLE), "train_inner/loss", "num_updates"),
        ("run.log", lines(AS_JSON), "loss", "num_updates"),
        ("both.jsonl", lines(BOTH), "eval/loss", "step"),
        ("both.csv", lines("train,{s},9\neval,{s},{v}", "Split,step,loss\n"), "eval/loss", "step"),
        ("both.log", lines("step {s} loss: {v}\ntest: step {s} loss: 9"), "none/loss", "step"),
        ("metrics/train/loss", lines("1795359040745 {v} {s}"), "train/loss", "step"),
        ("losses.txt", lines("{s} {v}"), "loss", "step"),
        ("titan.log", lines(TITAN, "[rank0]: started\n", "[titan] validate step: 2  loss: 9.0\n"),
         "loss", "step"),
        ("megatron.log", lines(MEGATRON), "lm loss", "iteration"),
        ("mlperf.log", lines(MLPERF), "eval_accuracy", "epoch_num"),
        ("nano.log", lines("step {s}: train loss {v:.4f}, val loss 3.2000"), "train loss", "step"),
        ("nano.log", lines("iter {s}: loss {v:.4f}, time 9.00ms, mfu 1.2%"), "loss", "iter"),
    ],
)  # fmt: skip
def test_a_log_is_read_in_its_own_form(tmp_path, name, text, scalar, steps):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    [log] = read_logs(path, scalar)
    assert log.points.tolist() == [[1, 0.5], [2, 0.25]]
    assert log.steps == steps


TABLE = "step,loss\n" + "".join(f"{s},{3 - s / 10}\n" for s in range(1, 11))


def zipped(text):
    """Without the time of day: the bytes are in names of cases, which workers have to agree on."""
    return gzip.compress(text.encode(), mtime=0)


FRAMES = ",frames,loss\n0,100,0.5\n1,200,0.25\n"
OF_LLMC = lines(LLMC.replace("trl", "loss"))


@pytest.mark.parametrize(
    ("name", "text", "step", "said"),
    [
        ("megatron.log", lines(MEGATRON), None,
         "--scalar loss: no such column; there are |lm loss, loss sc"),
        ("a.jsonl", lines(BOTH), None,
         "has rows with several values of 'split' (eval, train); choose"),
        ("main.log", OF_LLMC, None, "has s, lr, norm; say with --step"),
        ("main.log", OF_LLMC, "t", "--step t: no such column; there are s, lr, n"),
        ("a.csv", FRAMES, None, "no column 'step' or 'epoch'; has frames, loss; say with"),
        ("a.csv", FRAMES, "frame", "--step frame: no such column; there are frames, loss"),
    ],
)  # fmt: skip
def test_what_is_not_the_loss_or_no_step_is_asked_for(tmp_path, name, text, step, said):
    (tmp_path / name).write_text(text)
    with raises_line(BadInput, *said.split("|")):
        read_logs(tmp_path / name, "loss", step)


EXPORT = (
    '"Step","fp32-0 - _step","fp32-0 - loss","fp32-0 - loss__MIN","fp32-0 - loss__MAX",'
    '"amp-0 - loss","amp-0 - loss__MIN","amp-1 - loss"\n'
    '"1","1","0.5","0","0","0.6","0","0.7"\n"2","2","0.25","0","0","","",""\n'
)


def test_all_runs_of_an_export_stand_in_one_file(tmp_path):
    export = tmp_path / "wandb.csv"
    export.write_text(EXPORT)
    logs = read_logs(export, "loss")
    assert [log.run for log in logs] == ["fp32-0", "amp-0", "amp-1"]
    assert [log.points.tolist() for log in logs] == [[[1, 0.5], [2, 0.25]], [[1, 0.6]], [[1, 0.7]]]
    assert logs[1].name == f"{export}#amp-0"
    group = load_foreign([f"fp32={export}#amp-0", f"amp={export}#amp-[1-9]"], "loss", step="Step")
    assert [run.path for run in group.arms[0].runs] == [f"{export}#amp-1"]
    with pytest.raises(BadInput, match="no run of this name; there are fp32-0, amp-0, amp-1"):
        load_foreign([f"fp32={export}#bf16-*", f"amp={export}#amp-*"], "loss")
    with pytest.raises(BadInput, match="fp32-0: listed twice"):
        load_foreign([f"fp32={export}", f"amp={export}#fp32-0"], "loss")


def test_epochs_are_not_compared_with_steps(tmp_path):
    for name in ("epoch", "step"):
        (tmp_path / f"{name}.csv").write_text(f"{name},loss\n1,2\n2,1\n")
    (tmp_path / "history.json").write_text('{"loss": [2, 1]}')
    for second, counts in (("step.csv", "step"), ("history.json", "places in a list")):
        said = (f"{second} counts {counts}", "epoch.csv counts epoch", "name the column of steps")
        with raises_line(BadInput, *said):
            load_foreign([f"fp32={tmp_path / 'epoch.csv'}", f"amp={tmp_path / second}"], "loss")


def test_folders_of_several_tools_are_runs(tmp_path):
    for seed in range(3):
        run = tmp_path / f"mlruns/1/{seed}ab"
        (run / "metrics/val").mkdir(parents=True)
        (run / "meta.yaml").write_text("")
        (run / "metrics/val/loss").write_text(f"{NOW} 0.5 1\n{NOW} 0.25{seed} 2\n{NOW} 0 3\n")
        for step in (9, 10):
            state = tmp_path / f"hf/s{seed}/checkpoint-{step}/trainer_state.json"
            state.parent.mkdir(parents=True)
            history = [{"step": at, "val/loss": 0.5 + seed} for at in range(step)]
            state.write_text(json.dumps({"log_history": history}))
    group = load_foreign([f"fp32={tmp_path / 'mlruns'}", f"amp={tmp_path / 'hf'}"], "val/loss")
    assert [run.evals["step"].tolist() for run in group.baseline.runs] == [[1, 2, 3]] * 3
    assert [run.last_step for run in group.arms[0].runs] == [9] * 3  # of the newest checkpoint
    with pytest.raises(BadInput, match="0ab: --scalar loss: no such column; there are val/loss"):
        load_foreign([f"fp32={tmp_path / 'mlruns'}", f"amp={tmp_path / 'hf'}"], "loss")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "step,loss\n1,2\n2,abc\n", "line 3: 'abc' is not a number"),
        ("a.csv", "step,loss\n1,2\n2\n", "line 3: 1 cells"),
        ("a.csv", "step,loss\nnan,2\n", "steps must be finite"),
        ("a.csv", b"step,loss\n1,2\xff\n", "not a text file"),
        ("a.jsonl", '{"step": 1, "loss": 2}\n{"step": \n{"step": 3, "loss": 2}\n',
         "line 2: is not a JSON record"),
        ("a.json", '[{"step": 1, "loss": true}]', "record 1: True is not a number"),
        ("a.json", "[1, 2]", "not a list of records"),
        ("a.json", '{"loss": {"values": 5}}', "'loss' must be a list of values"),
        ("a.json", '{"loss": {"values": [5], "start_step": 1}}',
         "'step' must be a list of values; save"),
        ("a.json", '{"loss": [1, 2], "step": 5}', "'step' must be a list of values"),
        ("a.txt", "1 0.5\n1e999 0.25\n", "steps must be finite"),
        ("a.log", ":::MLLOG {nothing}\n", "line 1: is not an entry of MLPerf"),
        ("a.csv", "step;loss\n1;0,5\n2;0.5\n", "line 3: '0.5' is not a number beside '0,5' in "
         "line 2; write numbers with a decimal point alone"),
        ("a.csv", "step;loss\n1,000;1,234.5\n", "line 2: '1,234.5' is not a number beside '1,000'"),
        ("a.csv", "step;loss\n1.000;1.234,5\n", "line 2: '1.000' is not a number beside '1.234,5'"),
        ("a.csv", "step;loss\n1 000;0.5\n", "line 2: '1 000' is not a number"),
        ("a.csv", "step;loss\n1'000;0.5\n", 'line 2: "1\'000" is not a number'),
        ("a.csv", "step,loss\n1,0,5\n2,0,4\n", "line 2: 3 cells, the header has 2"),
        ("a.jsonl", '{"step": 1, "loss": 2}\n{"step": 2, "lo\n', "line 2: is not a JSON record"),
        ("a.log", "{'loss': 1, 'epoch': 1}\n{'loss': <object>}\n",
         "line 2: is not a single dictionary"),
        ("a.csv.gz", zipped(TABLE)[:-9], "not a complete gzip archive"),
        ("a.csv.gz", TABLE, "not a complete gzip archive"),
    ],
)  # fmt: skip
def test_damage_is_told_with_its_place(tmp_path, name, text, reason):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with raises_line(Damaged, f"{tmp_path / name}: ", reason):
        read_logs(tmp_path / name, "loss")


PACKAGE = """from mprun.extensions.logs.log_formats import LogFormat


def read(wanted):
    if not wanted.text.startswith("# odd"):
        return None
    lines = enumerate(wanted.text.splitlines()[1:], start=1)
    return wanted.of_records([(f"line {n}", {"step": n, "loss": line}) for n, line in lines])


ODD = LogFormat("a loss a line", read, lambda entries: [e for e in entries if e.suffix == ".odd"])
"""


def test_an_installed_package_adds_a_format(tmp_path, monkeypatch):
    entry = tmp_path / "site" / "odd-1.dist-info" / "entry_points.txt"
    entry.parent.mkdir(parents=True)
    entry.write_text("[mprun.log_formats]\nodd = odd_logs:ODD\n")
    (tmp_path / "site" / "odd_logs.py").write_text(PACKAGE)
    for name, last in (("fp32", "0.25"), ("amp", "0.5")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.odd").write_text(f"# odd\n0.5\n{last}\n")
    specs = [f"{name}={tmp_path / name}" for name in ("fp32", "amp")]
    with pytest.raises(BadInput, match="contains no log"):
        load_foreign(specs, "loss")
    monkeypatch.syspath_prepend(tmp_path / "site")
    announced.cache_clear()
    try:
        group = load_foreign(specs, "loss")
        assert group.baseline.runs[0].evals["loss"].tolist() == [0.5, 0.25]
        with raises_line(BadInput, "a.odd: --scalar lr: no such column; there are step, loss"):
            read_logs(tmp_path / "amp" / "a.odd", "lr")
        [event_file] = write_events(tmp_path / "tb", {"loss": [(1, 0.5)]}).iterdir()
        assert read_logs(event_file, "loss")[0].points.tolist() == [[1, 0.5]]
        (tmp_path / "amp" / "a.odd").write_text("# odd\nmuch\n")
        with raises_line(Damaged, "a.odd: line 1: 'much' is not a number"):
            load_foreign(specs, "loss")
    finally:
        announced.cache_clear()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "step,loss,loss\n1,2,2.3\n", "line 1: 2 columns are called 'loss'; rename all"),
        ("a.csv", "step,step,loss\n1,2,2.3\n", "line 1: 2 columns are called 'step'; rename all"),
        ("a.csv", TABLE + TABLE.replace(",2", ",1"), "line 13: begins again, at step 1"),
        ("a.txt", "1 3\n5 2\n4 3\n9 1\n8 2\n7 3\n", "3 of 3 steps appear twice with different"),
        ("a.txt", "0 3\n5 2\n0 3.5\n", "line 3: begins again, at step 0 after 5: there m"),
        ("a.log", "step 0 loss 3\nstep 5 loss 2\nfin\nstep 0 loss 1\n", "line 4: begins again"),
        ("a.csv", TABLE + "11,\n12,\n13,\n", "line 12: from here to step 13 'loss' has no value"),
        ("a.json", '[{"step": 1, "loss": 1}, {"step": 9, "loss": null}]', "record 2: from here t"),
        ("a.jsonl", '{"step": 1, "loss": 1}\n{"step": 2, "loss": 1, "loss": 2}\n',
         "line 2: contains 'loss' twice"),
        ("a.jsonl", '{"step": 1, "loss": 2, "loss": 1}\n{"step": 2, "loss": 1}\n',
         "line 1: contains 'loss' twice"),
        ("a.json", '[{"step": 1, "loss": 1, "loss": 2}]', "line 1: contains 'loss' twice"),
        ("a.json", '[{"step": 1,\n"loss": 1, "loss": 2}]', "a record: contains 'loss' twice"),
        ("a.log", "{'loss': 1, 'epoch': 1}\n{'loss': 2, 'epoch': 2, 'loss': 1}\n",
         "line 2: contains a name twice"),
        ("a.log", "step 1 loss 3\nstep 2 loss 2  loss 1\n", "line 2: loss has the values 2 and 1; must"),  # noqa: E501
        ("a.log", "step 1 loss 3\nstep 2 loss 2\nstep 2 loss 4\n",
         "step 2 has two values, 2 in line 2 and 4 in line 3: there may be two curves of one"),
        ("a.csv", TABLE + "4,9\n10,8\n12,8\n", "line 12: goes back to step 4 after 10, with"),
        ("a.log", lines(SIMPLE), "--scalar loss: has rows with several values"),
        ("a.csv", "Split,step,loss\ntrain,1,2\neval,2,1\n", "--scalar loss: has rows with several "
         "values of 'Split' (eval, train); choose one, e.g. --scalar train/loss. If all these "
         "rows are one curve, remove the field"),
        ("a.json", '[{"step": 1, "loss": 2}, {"step": 3, "loss": 2, "context": {"subset": "val"}}]',
         "--scalar loss: has rows with several values of 'context.subset' (none, val); choose one"),
        ("a.json", '{"a\\nb": [1, 2]}', "--scalar loss: no such column; there are 'a\\nb'"),
        ("metrics.json", json.dumps(dict.fromkeys(("train.loss", "train.top1"), SACRED["loss"])),
         "--scalar loss: no such column; there are train.loss, train.top1; did you mean "
         "'train.loss'?"),
        ("loss", f"{NOW} 2 1 train 1f\n{NOW} 3 2 eval 2e\n", "has values on several datasets (ev"),
        ("a.log", "step 1 | loss 3\nval: step 2 | loss 3\n", "--scalar loss: has rows with "
         "several values of 'kind of line' (none, val); choose one, e.g. --scalar val/loss"),
        ("a.csv", "step,loss,phase\n1,2,a\n2,2,b\n3,1,a\n", "--scalar loss: has rows with several"),
        ("a.csv", "step,loss,phase\n1,2,a\n2,2,a\n3,1,b\n", "--scalar loss: has rows with several"),
        ("a.csv", "Step,Tag,Value\n1,lr,2\n", "--scalar loss: no such column; there are Tag, V"),
        ("a.json", '{"tokens": [10, 20], "loss": [2, 1]}', "--scalar loss: 'tokens' may count "
         "its steps; if so, add --step tokens"),
        ("a.json", '{"step": [1, 2, 3], "loss": [2, 1]}', "'step' and 'loss' must have "
         "equally many values, got 3 and 2"),
        ("a.json", '{"loss": {"10": 2}}', "'loss' is a mapping; save the log as CSV or JSON lines"),
        ("a.json", '{"loss": {"values": [2, 1], "steps": [1]}}', "'step' and 'loss' must "
         "have equally many values, got 1 and 2"),
        ("a.json", '{"loss": {"values": [2, 1], "tokens": [5, 9]}}', "'loss' also has the fields"),
        ("a.csv", "step;loss\n1;2,345\n2;2,125\n", "line 2: '2,345' may mean 2345 or 2.345; "),
        ("a.log", "step 1 loss 2,345\n", "line 1: '2,345' may mean 2345 or 2.345; write numbers"),
    ],
)  # fmt: skip
def test_a_log_with_two_readings_is_refused_at_its_line(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with raises_line(BadInput, f"{tmp_path / name}: {said}"):
        read_logs(tmp_path / name, "loss")


HF = "{{'loss': {v}, 'grad_norm': np.float64(1.5), 'learning_rate': 5e-05, 'epoch': {s}}}"


@pytest.mark.parametrize(
    ("name", "text", "scalar", "note"),
    [
        ("a.csv", lines("{s};{v}", "step;loss\n").replace(".", ","), "loss", "like 0,5"),
        ("a.csv", 'step,loss\n1,"0,5"\n2,"0,25"\n', "loss", "like 0,5"),
        ("a.txt", "1 0,5\n2 0,25\n", "loss", "like 0,5"),
        ("a.log", "step 1  loss 0,5\nstep 2  loss 0,25\n", "loss", "like 0,5"),
        ("a.csv.gz", zipped(lines("{s},{v}", "step,loss\n")), "loss", None),
        ("a.log", lines(HF, "  0%|  | 0/2 [00:00<?, ?it/s]\r 50%|#| 1/2 [00:01<00:01]  \n"),
         "loss", None),
        ("a.log", lines(HF, after="{'eval_loss': nan, 'epoch': 2}\n{'train_runtime': '9.1'}\n"),
         "loss", None),
        ("a.log", lines(HF).replace("0.5", "tensor(0.5, device='cuda:0')"), "loss", None),
        ("a.log", "50%|# | 1/2 [00:01<00:01] {'loss': '0.5', 'epoch': '1'}\n{'loss': '0.25', "
         "'epoch': '2'}\n{'loss': '0.", "loss", "line 3 does not end: it may be cut off, and is"),
        ("a.csv", lines("{s},{v}", "step,loss\n") + "3,0.0", "loss", "line 4 does not end: it may"),
        ("a.csv", lines("{s},{v}", "step,loss\n") + "3", "loss", "line 4 does not end: it may be"),
        ("a.txt", lines("{s} {v}") + "3 0.0", "loss", "line 3 does not end: it may be cut off"),
        ("a.jsonl", lines('{{"step": {s}, "loss": {v}}}', after='{"step": 3, "lo'), "loss",
         "line 3 does not end: it may be cut off, and is left out"),
        ("a.jsonl", lines('{{"step": {s}, "loss": {v}}}').strip(), "loss", None),
    ],
)  # fmt: skip
def test_a_log_is_read_as_it_is_meant(tmp_path, name, text, scalar, note):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    [log] = read_logs(path, scalar)
    assert log.points.tolist() == [[1, 0.5], [2, 0.25]]
    assert len(log.notes) == (note is not None) and (note or "") in "".join(log.notes)


def test_a_resumed_run_counts_from_its_checkpoint_on(tmp_path):
    path = tmp_path / "a.csv"
    # To step 10, again from 8 with other values to 9, where it ends.
    path.write_text(TABLE + "8,1.5\n9,1.25\n")
    [log] = read_logs(path, "loss")
    assert log.points[-3:].tolist() == [[7, 2.3], [8, 1.5], [9, 1.25]] and len(log.points) == 9
    assert log.notes == [
        f"{path}: line 12: goes back to step 8 after 10: what is written from there on counts, and "
        "of what was before it 2 values do not"
    ]
    path.write_text(TABLE + "8,1.5\n9,1.25\n5,2.25\n6,1.75\n")
    [log] = read_logs(path, "loss")
    assert log.points[-3:].tolist() == [[4, 2.6], [5, 2.25], [6, 1.75]] and len(log.points) == 6
    assert "line 12: goes back to step 8 after 10 (and 1 times more): what" in log.notes[0]
    # Rows of the same values are no second reading.
    path.write_text(TABLE + "8,2.2\n9,2.1\n")
    [log] = read_logs(path, "loss")
    assert len(log.points) == 10 and log.notes == [
        f"{path}: 2 steps written twice, with the same value"
    ]


def test_blanks_between_values_and_a_few_at_the_end_are_no_second_reading(tmp_path):
    path = tmp_path / "a.csv"
    rows = "".join(f"{s},{1 / s if s % 4 == 0 else ''},1\n" for s in range(1, 12))
    path.write_text("step,loss,lr\n" + rows)
    assert read_logs(path, "loss")[0].points[:, 0].tolist() == [4, 8]
    path.write_text("step,loss,lr\n" + rows + "12,,1\n13,,1\n")
    with raises_line(BadInput, "line 10: from here to step 13 'loss' has no value"):
        read_logs(path, "loss")


@pytest.mark.parametrize("left", [3, 20, 40])
def test_an_event_file_that_ends_within_a_record_is_read_up_to_it(tmp_path, left):
    [path] = write_events(tmp_path, {"loss": [(s, 1 / s) for s in (1, 2, 4)]}).iterdir()
    size = path.stat().st_size
    assert read_logs(tmp_path, "loss")[0].notes == []
    path.write_bytes(path.read_bytes()[: size - 60 + left])
    [log] = read_logs(tmp_path, "loss")
    assert 1 <= len(log.points) < 3
    assert log.notes == [f"{tmp_path}: {path.name} ends within a record: read up to there"]


def test_each_record_of_an_event_file_is_checked_once(tmp_path, monkeypatch):
    from tensorboard.compat.tensorflow_stub import pywrap_tensorflow as own

    write_events(tmp_path, {"loss": [(s, 1 / s) for s in range(1, 50)]})
    count, checksum = [], own.masked_crc32c
    monkeypatch.setattr(own, "masked_crc32c", lambda data: count.append(1) or checksum(data))
    [log] = read_logs(tmp_path, "loss")
    # Of the length and of the content, also for what stands before the points.
    assert len(log.points) == 49 and 98 <= len(count) <= 110


def test_an_event_file_with_a_wrong_byte_is_refused_there(tmp_path):
    [path] = write_events(tmp_path, {"loss": [(s, 1 / s) for s in range(1, 9)]}).iterdir()
    whole = path.read_bytes()
    for place in (len(whole) // 2, len(whole) - 9, 3):
        path.write_bytes(bytes(byte ^ (255 * (at == place)) for at, byte in enumerate(whole)))
        with raises_line(Damaged, f"{path}: byte ", "a record has a wrong checksum") as caught:
            read_logs(tmp_path, "loss")
        begin = int(str(caught.value).partition(": byte ")[2].partition(":")[0])
        assert begin <= place
        path.write_bytes(path.read_bytes()[:begin])  # as the line says
        if begin:
            assert len(read_logs(tmp_path, "loss")[0].points) < 8


def test_a_folder_of_text_logs_reads_as_its_files_do(tmp_path):
    for name in ("fp32", "amp"):
        (tmp_path / name).mkdir()
        for seed in (0, 1, 10):
            text = lines(f"step: {{s}}  loss: {seed}{{v}}")
            (tmp_path / name / f"s{seed}.log").write_text(text)
        (tmp_path / name / "requirements.txt").write_text("torch==2.0\n")
        (tmp_path / "sacred" / name / "1").mkdir(parents=True)
        (tmp_path / "sacred" / name / "1/metrics.json").write_text(json.dumps(SACRED))
        (tmp_path / "sacred" / name / "1/cout.txt").write_text("INFO - training\n")
    group = load_foreign([f"fp32={tmp_path / 'fp32'}", f"amp={tmp_path / 'amp'}"], "loss")
    assert [run.evals["loss"][0] for run in group.baseline.runs] == [0.5, 10.5, 100.5]
    runs = [f"{name}={tmp_path / 'sacred' / name}" for name in ("fp32", "amp")]
    assert load_foreign(runs, "loss").baseline.runs[0].path.endswith("metrics.json")
    (tmp_path / "amp/valid.log").write_text(lines("step: {s}  loss: {v}"))
    told = (
        "amp/valid.log and s0.log: these may be several runs, or parts of one run; name every run"
    )
    with raises_line(BadInput, told):
        load_foreign([f"fp32={tmp_path / 'fp32'}", f"amp={tmp_path / 'amp'}"], "loss")


@pytest.mark.parametrize(
    ("name", "text", "scalar", "step", "points"),
    [
        ("metrics.json", json.dumps({"loss": SACRED["loss"] | {"steps": [10, 20]}}), "loss", None,
         [[10, 0.5], [20, 0.25]]),
        ("main.log", lines(LLMC), "trl", "s", [[1, 0.5], [2, 0.25]]),
        ("a.json", '{"frames": [100, 200], "loss": [0.5, 0.25]}', "loss", "frames",
         [[100, 0.5], [200, 0.25]]),
        ("a.csv", FRAMES, "loss", "frames", [[100, 0.5], [200, 0.25]]),
        ("a.csv", "step,loss,phase\n1,3,warmup\n2,2,warmup\n3,1,main\n", "warmup/loss", None,
         [[1, 3], [2, 2]]),
    ],
)  # fmt: skip
def test_steps_and_a_curve_are_those_that_are_named(tmp_path, name, text, scalar, step, points):
    (tmp_path / name).write_text(text)
    [log] = read_logs(tmp_path / name, scalar, step)
    assert log.points.tolist() == points


def framed(*records):
    """The records in LevelDB's log format, behind wandb's seven bytes."""
    made = b":W&B\xe1\xbe\x00"
    for record in records:
        part = 0
        while part == 0 or record:
            if (left := 2**15 - len(made) % 2**15) < 7:
                made += bytes(left)
                left = 2**15
            content, record = record[: left - 7], record[left - 7 :]
            kind = (1 if part == 0 else 4) if not record else (2 if part == 0 else 3)
            body = bytes([kind]) + content
            made += struct.pack("<IH", zlib.crc32(body), len(content)) + body
            part += 1
    return made


def test_records_of_an_offline_run_cross_blocks(tmp_path):
    # 32,768 - 7 - 7 - 32,748 = 6 bytes are left of the first block: no header fits.
    records = [b"a" * 32_748, b"b", b"c" * 70_000, b"", b"d"]
    path = tmp_path / "run.wandb"
    path.write_bytes(framed(*records))
    wanted = Wanted(path, "loss")
    assert list(binary_logs._framed(wanted)) == records and not wanted.notes
    path.write_bytes(framed(*records)[:-1])
    assert list(binary_logs._framed(wanted)) == records[:-1]
    assert wanted.notes == ["it ends within a record: read up to there"]
    content = bytearray(framed(*records))
    content[40_000] ^= 1
    path.write_bytes(content)
    with raises_line(Damaged, f"{path}: byte 32", "a record has a wrong checksum"):
        list(binary_logs._framed(wanted))


def message(*fields):
    """A protobuf message of (number, bytes or integer); an integer is a varint."""
    made = b""
    for number, value in fields:
        whole = isinstance(value, bytes)
        numbers = [number << 3 | (2 if whole else 0), len(value) if whole else value]
        for rest in numbers:
            while rest > 127:
                made += bytes([rest & 127 | 128])
                rest >>= 7
            made += bytes([rest])
        made += value if whole else b""
    return made


def test_an_offline_run_is_its_history(tmp_path):
    """Other records and values of other kinds are left out, as in wandb 0.31's files."""

    def record(step, loss):
        items = [(1, message((2, b"val"), (2, b"loss"), (16, loss)))]
        items += [(1, message((1, b"_step"), (16, b"%d" % step), (3, 300)))]
        items += [(1, message((1, b"image"), (7, b"x" * 300)))]
        return message((1, 7), (2, message(*items, (2, message((1, step))))), (200, b"info"))

    path = tmp_path / "run.wandb"
    path.write_bytes(b":W&B\xe1\xbe\x01" + bytes(99))
    with raises_line(BadInput, f"{path}: begins with 3a572642e1be01, but", "export its"):
        read_logs(path, "loss")
    other = message((1, 1), (17, b"y" * 200))
    path.write_bytes(framed(other, record(1, b"0.5"), other, record(2, b"0.25"), record(3, b"NaN")))
    [log] = read_logs(path, "val.loss")
    assert log.points[:2].tolist() == [[1, 0.5], [2, 0.25]] and np.isnan(log.points[2, 1])
    with raises_line(BadInput, "--scalar loss: no such column; there are val.loss, _step, image"):
        read_logs(path, "loss")
