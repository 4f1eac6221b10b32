"""The questions that a CPU can answer, and that one question's failure leaves the others alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "cuda_questions.py"
CPU = torch.device("cpu")


def test_embedding_gradients_on_a_cpu(module):
    """Adding 1 to 2048 in FP16, or to 256 in BF16, gives the same number again (a tie, to even)."""
    found = module("questions.accumulation").embedding_gradient(CPU)
    ones = {name: value["ones"] for name, value in found.numbers.items()}
    assert ones["F.embedding 8192 float16"] == 2048
    assert ones["F.embedding 8192 bfloat16"] == 256
    assert ones["F.embedding, emulated 8192 float16"] == 8192
    assert ones["F.embedding, emulated 8192 bfloat16"] == 8192
    for dtype in ("float16", "bfloat16"):
        # One rounding of an FP32 sum; the sum's own error is far below one of these.
        assert found.numbers[f"F.embedding, emulated 8192 {dtype}"]["roundings"] < 1.01
    assert "2048 in float16" in found.text and len(found.rows) == len(found.numbers)


def test_grad_scaler_collapse_on_a_cpu(module):
    found = module("questions.skipped_updates").grad_scaler_collapse(CPU)
    # 2^16 / 2^165 = 2^-149 is FP32's smallest number, and half of it is a tie that goes to 0.
    for row in found.numbers["torch"]:
        assert (row["overflows until 0"], row["scale afterwards"]) == (166, 0)
    own = {"scale at the floor": 2.0**-14, "collapsed": True, "weights finite": True}
    assert found.numbers["mprun"] == own
    # Gradients of 0 times an inverse scale of inf, and no flag: the check is before the product.
    assert all(row["weights NaN"] == 1 for row in found.numbers["torch"])
    assert all(row["found_inf on a healthy step"] == 0 for row in found.numbers["torch"])


def test_batch_norm_after_a_skipped_step_on_a_cpu(module):
    found = module("questions.skipped_updates").batch_norm_after_skip(CPU)
    torch_amp, mprun = found.numbers["torch.amp"], found.numbers["mprun"]
    assert not torch_amp["weights moved"] and not mprun["weights moved"]
    assert torch_amp["statistics not finite"] > 0 and torch_amp["evaluation NaN"] > 0
    assert mprun["statistics not finite"] == 0 and mprun["evaluation NaN"] == 0


def test_the_fused_trap_counts_elements(module):
    found = module("questions.skipped_updates").fused_sgd_half(CPU)
    counts = found.numbers["elements updated"]
    # FP32 is right in every version; the halves are what is asked.
    assert [counts[f"torch.float32 {size}"] for size in (4, 64, 70)] == [4, 64, 70]
    wrong = [name for name, moved in counts.items() if moved != int(name.split()[-1])]
    assert found.text.startswith("Yes" if wrong else "Every element")


def test_linear_cross_entropy_is_compared_with_float64(module):
    found = module("questions.skipped_updates").linear_cross_entropy(CPU)
    assert found.numbers["there"] is hasattr(torch.nn.functional, "linear_cross_entropy")
    # FP32 products of 32 terms and a logarithm of 100: some 2^-24, far below 1e-5.
    assert found.numbers.get("relative error", 0) < 1e-5


def run(*arguments, timeout=120):
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


@pytest.mark.slow
def test_the_command_answers_and_says_what_needs_a_gpu(tmp_path):
    names = ["lstm_graph", "grad_scaler_collapse", "batch_norm_after_skip", "host_time"]
    only = [f"--only={name}" for name in names]
    files = [f"--json={tmp_path / 'q.json'}", f"--markdown={tmp_path / 'q.md'}"]
    done = run("--device=cpu", *only, *files)
    assert done.returncode == 0, done.stderr
    answers = {a["name"]: a for a in json.loads((tmp_path / "q.json").read_text())["answers"]}
    assert answers["lstm_graph"]["text"] == "needs a CUDA device"
    assert answers["lstm_graph"]["status"] == "not answered"
    assert [answers[name]["status"] for name in names[1:]] == ["answered"] * 3
    assert all(value > 0 for value in answers["host_time"]["numbers"].values())
    text = (tmp_path / "q.md").read_text()
    assert text.count("`python benchmarks/cuda_questions.py --only ") == len(names)
    assert text.strip() == done.stdout.strip()


def failing(device):
    """Does this one fail?"""
    raise RuntimeError("as it was told to")


def ending(device):
    """Does this one end its process?"""
    raise SystemExit(7)


@pytest.mark.slow
def test_a_failure_and_a_lost_process_leave_the_others_alone(module, monkeypatch, tmp_path, capsys):
    questions = module("cuda_questions")
    # The workers are this script, which knows three more questions than the real one.
    script = tmp_path / "three_more.py"
    script.write_text(
        f"import sys, time\nsys.path[:0] = [{str(ROOT / 'benchmarks')!r}, {str(ROOT)!r}]\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import cuda_questions, test_questions\n"
        "cuda_questions.QUESTIONS |= {'failing': test_questions.failing,\n"
        "    'ending': test_questions.ending, 'sleeping': lambda device: time.sleep(600)}\n"
        "sys.exit(cuda_questions.main(sys.argv[1:]))\n"
    )
    monkeypatch.setattr(questions, "__file__", str(script))
    more = {"failing": failing, "ending": ending, "sleeping": failing}
    monkeypatch.setattr(questions, "QUESTIONS", questions.QUESTIONS | more)
    names = ["failing", "linear_cross_entropy", "ending", "grad_scaler_collapse"]
    record = tmp_path / "q.json"
    only = [f"--only={name}" for name in names]
    assert questions.main(["--device=cpu", *only, f"--json={record}"]) == 1
    answers = {a["name"]: a for a in json.loads(record.read_text())["answers"]}
    assert answers["failing"]["text"] == "RuntimeError: as it was told to"
    assert answers["ending"]["text"] == "the process ended with 7"
    assert [answers[name]["status"] for name in names] == ["failed", "answered"] * 2
    assert "failed: RuntimeError: as it was told to" in capsys.readouterr().out
    (late,) = questions._from_worker(["sleeping"], CPU, -55)
    assert late["status"] == "failed" and "no answer" in late["text"]


@pytest.mark.gpu
def test_answers_on_cuda_that_are_promises_of_mprun(module):
    device = torch.device("cuda")
    skipped = module("questions.skipped_updates")
    own = skipped.grad_scaler_collapse(device).numbers["mprun"]
    assert own == {"scale at the floor": 2.0**-14, "collapsed": True, "weights finite": True}
    found = skipped.batch_norm_after_skip(device).numbers["mprun"]
    assert found["statistics not finite"] == 0 and found["evaluation NaN"] == 0


@pytest.mark.gpu
def test_a_capture_that_works_gives_moving_weights(module):
    """Whether cuDNN's LSTM can be captured is open; a capture that trains nothing is wrong."""
    found = module("questions.lstm_graph").lstm_graph(torch.device("cuda"))
    for name, kind in found.numbers.items():
        assert kind["captured"] is False or kind["moved"], name
    torch.backends.cudnn.deterministic = False
