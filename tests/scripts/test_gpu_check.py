"""scripts/gpu_check: time limits, refusals, what it leaves; and, slow, a dry run of every part."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check"


@pytest.fixture
def module(monkeypatch):
    """``module("gpu_check_parts")``, as the script imports it."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


@pytest.fixture
def run_python(module, tmp_path):
    """``run_python(code, limit)``: how a Python program ended, its stdout, its stderr."""
    processes = module("gpu_check_processes")

    def run(code, limit=30.0):
        step = processes.Step("program", [sys.executable, "-c", code])
        out, err = tmp_path / "out.txt", tmp_path / "err.txt"
        ended = processes.run_limited(step, limit, out, err, dict(os.environ))
        return ended, out.read_text(), err.read_text()

    return run


def variables(**more):
    """This environment for a dry run by this interpreter, without what an outer call has set."""
    outer = ("PARTS", "LIMIT", "BENCH", "GPU_CHECK_PYTHON", "MPRUN_COMMIT")
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    return kept | {"MPRUN_PYTHON": sys.executable, "DEVICE": "cpu"} | more


def gpu_check(*arguments, timeout=60, **environment):
    """The finished process of the script with these variables."""
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env=variables(**environment),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that ended and whose parent has not asked yet is still listed.
    status = Path(f"/proc/{pid}/status").read_text()
    return "State:\tZ" not in status


def test_time_is_shared_in_proportion_and_passed_on(module):
    allotted = module("gpu_check_processes").allotted
    assert allotted(100, [1, 3]) == 25
    # The first took 5 of its 25 seconds: the second has all the rest.
    assert allotted(95, [3]) == 95
    assert allotted(-3, [1, 2]) == 0


def test_a_program_that_ends_by_itself(run_python):
    ended, out, err = run_python("import sys; print('there'); sys.exit(3)")
    assert (ended.code, out, err) == (3, "there\n", "")


def test_an_overrun_is_interrupted_first_so_that_it_can_write(run_python):
    code = (
        "import time\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    print('written')\n"
    )
    ended, out, _ = run_python(code, limit=2.0)
    assert ended.code is None and out == "written\n"
    assert ended.seconds < 60


def test_an_overrun_is_ended_with_what_it_started_in_other_groups(module, run_python, monkeypatch):
    monkeypatch.setattr(module("gpu_check_processes"), "GRACE_S", 0.5)
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(sleeper, start_new_session=True)\n"
        "print(os.getpid(), child.pid, flush=True)\ntime.sleep(600)\n"
    )
    ended, out, _ = run_python(code, limit=3.0)
    assert ended.code is None
    time.sleep(0.2)
    assert len(out.split()) == 2
    assert not any(alive(int(pid)) for pid in out.split())


def test_a_program_that_is_not_there(module, tmp_path):
    processes = module("gpu_check_processes")
    step = processes.Step("none", [str(tmp_path / "no program")])
    ended = processes.run_limited(step, 5, tmp_path / "out", tmp_path / "err", {})
    assert ended.code == 127
    assert "no program: No such file" in (tmp_path / "err").read_text()


def test_files_whose_packages_are_missing_are_left_out(module, tmp_path, monkeypatch):
    parts = module("gpu_check_parts")
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    marked = "import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    assert True\n"
    (tmp_path / "test_one.py").write_text(marked)
    (tmp_path / "test_two.py").write_text("import no_such_package\n" + marked)
    (tmp_path / "test_three.py").write_text("from no_such_package.inner import f\n" + marked)
    (tmp_path / "test_four.py").write_text("def test_it():\n    assert True\n")
    assert parts.gpu_test_files(tmp_path) == ["test_one.py"]


def test_every_file_with_a_gpu_test_is_chosen_here(module):
    """This environment has all packages that tests need."""
    chosen = set(module("gpu_check_parts").gpu_test_files(ROOT / "tests"))
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text()
    }
    assert "tests/tasks/test_on_cuda.py" in chosen and chosen == marked


def ended_step(module, tmp_path, code, **fields):
    processes, report = module("gpu_check_processes"), module("gpu_check_report")
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"
    out.write_text("| a |\n|---|\n")
    err.write_text("\n".join(f"line {i}" for i in range(100)))
    step = processes.Step("one", ["program", "an argument"], **fields)
    return report.step_report(step, processes.Ended(code, 1.5), 9.0, out, err)


def test_how_steps_are_reported(module, tmp_path):
    done = ended_step(module, tmp_path, 0)
    assert (done["status"], done["errors"], done["text"]) == ("done", "", "| a |\n|---|")
    assert done["command"] == "program 'an argument'"
    failed = ended_step(module, tmp_path, 1)
    assert failed["status"] == "failed (exit code 1)"
    assert failed["errors"].splitlines() == [f"line {i}" for i in range(80, 100)]
    assert ended_step(module, tmp_path, 3, accepted=(0, 3))["status"] == "done"
    assert ended_step(module, tmp_path, None)["status"] == "overran its time and was ended"
    lacking = ended_step(module, tmp_path, 0, record=tmp_path / "none.json")
    assert lacking["status"] == "failed (it left no none.json)"
    (tmp_path / "cut.json").write_text('{"a": ')
    cut = ended_step(module, tmp_path, 0, record=tmp_path / "cut.json")
    assert cut["status"].startswith("failed (cut.json: ")


def test_tests_of_the_bench_come_last_and_by_themselves(module, tmp_path):
    parts = module("gpu_check_parts")
    steps = parts.tests(parts.Setting(tmp_path, "cuda", None), 100.0)
    assert [step.name for step in steps] == ["tests", "tests_bench"]
    first, second = ({p for p in s.command if p.startswith("tests/")} for s in steps)
    assert first | second == set(parts.gpu_test_files(ROOT / "tests"))
    assert "tests/tasks/test_on_cuda.py" in first and first.isdisjoint(second)
    assert all(name.startswith("tests/bench/") for name in second)


def test_a_report_of_tests_is_counted(module, tmp_path):
    (tmp_path / "tests.xml").write_text(
        "<testsuites><testsuite><testcase classname='a' name='b'/>"
        "<testcase classname='a' name='c'><failure message='assert 1 == 2&#10;more'/></testcase>"
        "<testcase classname='a' name='d'><error message='broken'/></testcase>"
        "<testcase classname='a' name='e'><skipped message='no'/></testcase>"
        "</testsuite></testsuites>"
    )
    record = ended_step(module, tmp_path, 1, record=tmp_path / "tests.xml")["record"]
    assert (record["tests"], record["passed"], record["skipped"]) == (4, 1, 1)
    assert record["failed"] == {"a::c": ["assert 1 == 2"], "a::d": ["broken"]}


def test_what_is_left_keeps_the_limits_of_size_and_number(module, tmp_path, monkeypatch):
    report = module("gpu_check_report")
    monkeypatch.setattr(report, "MAX_FILE", 100_000)
    work, out = tmp_path / "work", tmp_path / "out"
    for folder in ("bench", "verdicts"):
        (work / folder).mkdir(parents=True)
    out.mkdir()
    for index in range(6):
        (work / "verdicts" / f"{index}.png").write_bytes(b"figure")
    (work / "bench" / "bench.png").write_bytes(b"bars")
    (work / "bench" / "large.png").write_bytes(os.urandom(200_000))
    (work / "verdicts" / "report.html").write_text("<p>")
    (work / "small.json").write_text("{}")
    (work / "weights.pt").write_bytes(b"not a record")
    left = report.leave_files(work, out)
    assert left["copied"][0] == "bench-bench.png" and left["copied"][-1] == "verdicts.html"
    # With the two summaries at most 8.
    assert len(list(out.iterdir())) <= 6
    assert left["not in records.tar.gz"] == ["bench/large.png"]
    with tarfile.open(out / "records.tar.gz") as archive:
        names = archive.getnames()
    assert "small.json" in names and "weights.pt" not in names
    assert max(path.stat().st_size for path in out.iterdir()) < 100_000


@pytest.mark.parametrize(
    "environment, told",
    [
        ({"PARTS": "tests,benhc"}, "PARTS=benhc: one of environment, tests, bench"),
        ({"PARTS": "data"}, "PARTS=data: needs the folder"),
        ({"DEVICE": "tpu"}, "DEVICE=tpu: cuda, or cpu"),
        ({"LIMIT": "soon"}, "LIMIT=soon: seconds"),
        ({"LIMIT": "20"}, "more than 30"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, environment, told):
    done = gpu_check(tmp_path / "out", **environment)
    assert done.returncode == 2
    assert told in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_results_are_not_written_over(tmp_path):
    (tmp_path / "gpu_check.json").write_text("{}")
    done = gpu_check(tmp_path)
    assert done.returncode == 2 and "name a new folder" in done.stderr
    assert (tmp_path / "gpu_check.json").read_text() == "{}"


def test_help_names_every_part(module):
    text = gpu_check("--help").stdout
    assert all(f"({name})" in text for name in module("gpu_check_parts").PARTS)
    assert gpu_check().returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_leaves_nothing(tmp_path):
    done = gpu_check(tmp_path / "out", DEVICE="cuda")
    assert done.returncode == 2
    assert "DEVICE=cpu is a dry run" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_of_every_part_with_one_that_fails(module, tmp_path):
    """Real code at its smallest size; the folder of real data is empty, so that part fails."""
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    done = gpu_check(out, tmp_path / "empty", timeout=900, LIMIT="800", MPRUN_COMMIT="abc123")
    record = json.loads((out / "gpu_check.json").read_text())
    assert done.returncode == 1, done.stdout + done.stderr
    assert list(record["parts"]) == list(module("gpu_check_parts").PARTS)
    steps = {s["name"]: s for part in record["parts"].values() for s in part["steps"]}
    ended = {name: step["status"] for name, step in steps.items()}
    assert ended.pop("real_data").startswith("failed"), steps["real_data"]
    assert set(ended.values()) == {"done"}, {n: steps[n]["errors"] for n in ended}
    machine = steps["machine"]["record"]
    assert machine["commit"] == "abc123" and machine["packages"]["torch"]
    assert steps["tests"]["record"]["tests"] > 0
    assert steps["fidelity"]["record"]["rows"] and steps["questions"]["record"]["answers"]
    text = (out / "gpu_check.md").read_text()
    assert text.startswith("# gpu_check on cpu: a part failed or overran\n")
    assert "- commit: abc123\n" in text
    assert "| quickstart_underflow" in text.replace("| results | ", "| ")
    for heading in record["parts"]:
        assert f"\n## {heading}\n" in text
    assert "float16: emulation on the CPU against native" in text
    files = list(out.iterdir())
    assert {"gpu_check.md", "gpu_check.json", "records.tar.gz"} < {path.name for path in files}
    assert any(path.suffix == ".png" for path in files)
    assert len(files) <= 8 and all(path.is_file() for path in files)
    assert max(path.stat().st_size for path in files) < 16 * 2**20
    with tarfile.open(out / "records.tar.gz") as archive:
        names = archive.getnames()
    assert any(name.endswith("metrics.jsonl") for name in names)
    assert "real_data.err.txt" in names


@pytest.mark.slow
def test_whoever_ends_it_gets_what_there_is(tmp_path):
    """A caller's own time limit sends SIGTERM."""
    out = tmp_path / "out"
    command, settings = [sys.executable, SCRIPT, str(out)], variables(PARTS="results,fidelity")
    with subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "quickstart_lost_updates" in line:
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 130
    assert "interrupted" in rest
    record = json.loads((out / "gpu_check.json").read_text())
    assert record["status"] == "interrupted"
    assert [s["status"] for s in record["parts"]["environment"]["steps"]] == ["done", "done"]
    assert "fidelity" not in record["parts"]
    assert (out / "records.tar.gz").exists()
