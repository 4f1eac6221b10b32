"""scripts/gpu_check: time limits, refusals, what it leaves; and, slow, a dry run of every part."""

import importlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check"
with pytest.MonkeyPatch.context() as patch:  # as the script imports them
    patch.syspath_prepend(ROOT / "scripts")
    import gpu_check_parts as parts
    import gpu_check_processes as processes
    import gpu_check_report as report
    import gpu_check_wheels as wheels


@pytest.fixture
def run_python(tmp_path):
    """``run_python(code, ..., limit=)``: how programs side by side ended, what they printed."""

    def run(*codes, limit=30.0):
        steps = [
            processes.Step(f"program {place}", [sys.executable, "-c", code])
            for place, code in enumerate(codes)
        ]
        started = [processes.Running(s, limit, tmp_path, dict(os.environ)) for s in steps]
        processes.wait_for(started)
        found = [(one, one.out.read_text(), one.err.read_text()) for one in started]
        return found if len(found) > 1 else found[0]

    return run


def variables(**more):
    """This environment for a dry run by this interpreter, without what an outer call has set."""
    outer = ("PARTS", "LIMIT", "BENCH", "GPU_CHECK_PYTHON", "MPRUN_COMMIT")
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    return kept | {"MPRUN_PYTHON": sys.executable, "DEVICE": "cpu"} | more


def gpu_check(*arguments, timeout=300, **environment):
    """The finished process of the script with these variables."""
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    how = {"capture_output": True, "text": True, "timeout": timeout}
    return subprocess.run(command, env=variables(**environment), **how)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that ended and whose parent has not asked yet is still listed.
    status = Path(f"/proc/{pid}/status").read_text()
    return "State:\tZ" not in status


def test_time_is_shared_in_proportion_and_passed_on():
    allotted = processes.allotted
    assert allotted(100, [1, 3]) == 25
    # The first took 5 of its 25 seconds: the second has all the rest.
    assert allotted(95, [3]) == 95
    assert allotted(-3, [1, 2]) == 0


def test_a_program_that_ends_by_itself(run_python):
    ended, out, err = run_python("import sys; print('there'); sys.exit(3)")
    assert (ended.code, out, err) == (3, "there\n", "")


@pytest.mark.slow
def test_an_overrun_is_interrupted_first_so_that_it_can_write(run_python):
    code = "import time\ntry: time.sleep(600)\nexcept KeyboardInterrupt: print('written')\n"
    ended, out, _ = run_python(code, limit=2.0)
    assert ended.code is None and out == "written\n"
    assert ended.seconds < 60


@pytest.mark.slow
def test_an_overrun_is_ended_with_what_it_started_in_other_groups(run_python, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
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


def test_programs_of_a_part_run_side_by_side_and_none_ends_another(run_python):
    meet = "import pathlib, time; pathlib.Path({own!r}).touch()\n"
    meet += "while not pathlib.Path({other!r}).exists(): time.sleep(0.01)\n"
    names = [os.path.join(tempfile.mkdtemp(), name) for name in "ab"]
    codes = [meet.format(own=a, other=b) for a, b in (names, names[::-1])]
    ended = run_python("import sys; sys.exit(2)", *codes)
    assert [one.code for one, _, _ in ended] == [2, 0, 0]


def test_a_program_that_is_not_there(tmp_path):
    step = processes.Step("none", [str(tmp_path / "no program")])
    one = processes.Running(step, 5, tmp_path, {})
    processes.wait_for([one])
    assert one.code == 127 and "no program: No such file" in one.err.read_text()


def test_files_whose_packages_are_missing_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    marked = "import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    assert True\n"
    (tmp_path / "test_one.py").write_text(marked)
    (tmp_path / "test_two.py").write_text("import no_such_package\n" + marked)
    (tmp_path / "test_three.py").write_text("from no_such_package.inner import f\n" + marked)
    (tmp_path / "test_four.py").write_text("def test_it():\n    assert True\n")
    assert parts.gpu_test_files(tmp_path) == ["test_one.py"]
    # A slow test beside one of a GPU is none of both.
    apart = marked + "\n@pytest.mark.slow\ndef test_other():\n    assert True\n"
    (tmp_path / "test_apart.py").write_text(apart)
    both = marked.replace("@pytest.mark.gpu", "@pytest.mark.gpu\n@pytest.mark.slow")
    (tmp_path / "test_both.py").write_text(both)
    assert parts.gpu_test_files(tmp_path, slow=True) == ["test_both.py"]
    assert parts.gpu_test_files(tmp_path) == ["test_apart.py", "test_one.py"]


def test_every_file_with_a_gpu_test_is_chosen_here():
    """This environment has all packages that tests need."""
    chosen = {*parts.gpu_test_files(ROOT / "tests")}
    chosen |= {*parts.gpu_test_files(ROOT / "tests", slow=True)}
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^ *@?(pytestmark = )?pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
    }
    assert "tests/tasks/test_on_cuda.py" in chosen and chosen == marked


def ended_step(tmp_path, code, **fields):
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"
    out.write_text("| a |\n|---|\n")
    err.write_text("\n".join(f"line {i}" for i in range(100)))
    step = processes.Step("one", ["program", "an argument"], **fields)
    ended = {"step": step, "limit": 9.0, "out": out, "err": err, "code": code}
    ended |= {"ended": True, "seconds": 1.5, "overran": code is None}
    return report.step_report(SimpleNamespace(**ended))


def test_how_steps_are_reported(tmp_path):
    done = ended_step(tmp_path, 0)
    assert (done["status"], done["errors"], done["text"]) == ("done", "", "| a |\n|---|")
    assert done["command"] == "program 'an argument'"
    failed = ended_step(tmp_path, 1)
    assert failed["status"] == "failed (exit code 1)"
    assert failed["errors"].splitlines() == [f"line {i}" for i in range(80, 100)]
    assert ended_step(tmp_path, 3, accepted=(0, 3))["status"] == "done"
    assert ended_step(tmp_path, None)["status"] == "overran its time and was ended"
    lacking = ended_step(tmp_path, 0, record=tmp_path / "none.json")
    assert lacking["status"] == "failed (it left no none.json)"
    (tmp_path / "cut.json").write_text('{"a": ')
    cut = ended_step(tmp_path, 0, record=tmp_path / "cut.json")
    assert cut["status"].startswith("failed (cut.json: ")


def option(step, name):
    return step.command[step.command.index(name) + 1]


def files_of(step):
    return [p for p in step.command if p.startswith("tests/") and p.endswith(".py")]


def test_every_part_is_in_one_call_and_the_seconds_of_a_call_are_all_given():
    script = runpy.run_path(str(SCRIPT))
    called = ["environment", *(name for call in parts.CALLS.values() for name in call)]
    assert called == list(parts.PARTS)
    for call in parts.CALLS.values():
        weights = [parts.PARTS[name].weight for name in ("environment", *call)]
        assert sum(weights) == script["LIMIT_S"] - script["RESERVE_S"]


def test_the_page_says_when_each_part_of_the_first_call_begins():
    rows = re.findall(r"^\| (\d):(\d\d) \|(.*)", (ROOT / "docs/bench.md").read_text(), re.M)
    said = {text: 60 * int(minute) + int(second) for minute, second, text in rows}
    begins = 0
    for name in ("environment", *parts.CALLS["first"]):
        own = {"environment": "doctor"}.get(name, name)
        assert [at for text, at in said.items() if f"`{own}`" in text] == [begins]
        begins += parts.PARTS[name].weight
    assert max(said.values()) == begins


@pytest.mark.parametrize(
    "asked, expected",
    [
        (None, "ratios tests memory tests_slow".split()),
        ("verdicts", ["results"]),
        ("tests,environment,verdicts,tests", ["tests", "results"]),
        ("data", ["data"]),
    ],
)
def test_parts_are_asked_for_by_name_or_by_call(monkeypatch, asked, expected):
    monkeypatch.delenv("PARTS", raising=False)
    if asked is not None:
        monkeypatch.setenv("PARTS", asked)
    wanted = runpy.run_path(str(SCRIPT))["_wanted_parts"]
    assert wanted(None) == ["environment", *expected]
    if asked == "verdicts":
        assert wanted(ROOT) == ["environment", "results", "data"]


@pytest.mark.slow
def test_every_gpu_test_is_in_one_part_and_the_most_important_ones_come_first(tmp_path):
    setting = parts.Setting(tmp_path, "cuda", None)
    steps = {s.name: s for n, p in parts.PARTS.items() if "tests" in n for s in p.steps(setting, 9)}
    assert "--reference" in steps.pop("fidelity").command
    slow = steps.pop("tests_slow")
    marks = {step.command[step.command.index("pytest") + 2] for step in steps.values()}
    assert marks == {"gpu and not slow"} and "gpu and slow" in slow.command
    assert "tests/execution/test_graphs_on_cuda.py" in files_of(slow)
    files = [name for step in steps.values() for name in files_of(step)]
    assert sorted(files) == sorted(parts.gpu_test_files(ROOT / "tests"))
    folders = list(dict.fromkeys(name.split("/")[1] for name in files_of(steps["tests"])))
    assert folders[:4] == ["precision", "tasks", "execution", "synchronisation"]
    for step in (*steps.values(), slow):
        assert f"--tests-log={tmp_path / step.name}.jsonl" in step.command
        assert int(option(step, "-n")) >= 2  # side by side


def test_the_first_call_compiles_what_its_ratios_measure(tmp_path, monkeypatch):
    parse = importlib.import_module("benchmarks.suite.__main__").parse
    monkeypatch.delenv("BENCH", raising=False)
    setting = parts.Setting(tmp_path, "cuda", None, ("environment", *parts.CALLS["first"]))

    def parsed(name):
        *_, step = parts.PARTS[name].steps(setting, 150.0)
        return parse(step.command[step.command.index("benchmarks.suite") + 1 :])

    ahead, ratios = parsed("environment"), parsed("ratios")
    assert (ahead.compile_ahead, ratios.compile_ahead, ratios.budget_s) == (True, False, 130)
    for options in (ahead, ratios):
        assert options.ratios and options.peers == ["amp", "amp+"] and options.modes is None
    doctor, *_ = parts.environment(setting, 75.0)
    assert option(doctor, "--budget") == "40" and doctor.most < 60
    later = parts.Setting(tmp_path, "cuda", None, ("environment", "gpt"))
    assert [step.name for step in parts.environment(later, 75.0)] == ["doctor"]
    memory, peers, gpt = parsed("memory"), parsed("bench_peers"), parsed("gpt")
    assert memory.peers == ["amp"] and {"fp32", "amp", "bf16_master"} <= set(memory.modes)
    assert peers.peers == gpt.peers == ["all"] and peers.only is None
    assert gpt.only == ["GPT-2"] and "fp8_rowwise" in gpt.modes
    monkeypatch.setenv("BENCH", '--only "DCGAN b512" --windows 3')
    assert parsed("ratios").only == ["DCGAN b512"] and parsed("bench_peers").windows == 3


def test_a_log_of_tests_tells_what_ran_also_when_it_is_cut(tmp_path):
    log = tmp_path / "tests.jsonl"
    lines = [
        {"test": "a::b", "started": True},
        {"test": "a::b", "outcome": "passed", "seconds": 1},
        {"test": "a::c", "outcome": "failed", "seconds": 1, "message": "assert 1 == 2"},
        {"test": "a::d", "outcome": "skipped", "seconds": 0},
        {"test": "a::e", "started": True},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"test": "a::e", "outc')
    record = ended_step(tmp_path, None, record=log)["record"]
    assert record == {
        **{"tests": 3, "passed": 1, "skipped": 1},
        "failed": {"a::c": "assert 1 == 2"},
        "not ended": ["a::e"],
    }


@pytest.mark.slow
def test_pytest_writes_that_log_as_it_goes(tmp_path):
    log = tmp_path / "tests.jsonl"
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.fixture\ndef broken():\n    yield\n    raise ValueError('at the end')\n"
        "def test_broken(broken): pass\n"
        "def test_no(): pytest.skip('no')\n"
        "def test_gone(): os._exit(9)\n"
        "def test_never(): pass\n"
    )
    (tmp_path / "test_a_bad_file.py").write_text("import no_such_package\n")
    command = [*(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"), str(tmp_path)]
    command += ["-p", "gpu_check_pytest", f"--tests-log={log}", "--continue-on-collection-errors"]
    settings = dict(os.environ) | {"PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 9, done.stdout + done.stderr
    record = ended_step(tmp_path, 9, record=log)["record"]
    assert (record["tests"], record["passed"], record["skipped"]) == (5, 1, 1)
    failed = {name.rpartition("/")[2]: message for name, message in record["failed"].items()}
    assert failed == {
        "test_a_bad_file.py": "E   ModuleNotFoundError: No module named 'no_such_package'",
        "test_some.py::test_bad": "assert 1 == 2",
        "test_some.py::test_broken": "ValueError: at the end",
    }
    assert [name.rpartition("::")[2] for name in record["not ended"]] == ["test_gone"]


@pytest.mark.slow
def test_processes_of_tests_write_one_log_and_one_that_dies_leaves_the_others(tmp_path):
    log = tmp_path / "tests.jsonl"
    lines = ["import os", *(f"def test_{i}(): assert {i} != 3" for i in range(8))]
    (tmp_path / "test_some.py").write_text("\n".join([*lines, "def test_gone(): os._exit(9)"]))
    command = [*(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2")]
    command += [str(tmp_path), "-p", "gpu_check_pytest", f"--tests-log={log}"]
    settings = dict(os.environ) | {"PYTHONPATH": str(ROOT / "scripts")}
    subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, text=True)
    record = ended_step(tmp_path, 1, record=log)["record"]
    assert (record["passed"], list(record["failed"].values())) == (7, ["assert 3 != 3"])
    assert [name.rpartition("::")[2] for name in record["not ended"]] == ["test_gone"]


SUMMARY = {"device": "cpu", "status": "done", "seconds": 1.0, "limit_s": 9.0, "parts": {}}


def test_what_is_left_keeps_the_limits_of_size_number_and_names(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_FILE", 100_000)
    work, out = tmp_path / "work", tmp_path / "out"
    for folder in ("ratios", "verdicts/top 1 (%)", "real_data"):
        (work / folder).mkdir(parents=True)
    out.mkdir()
    copied = []
    for index in range(6):
        (work / "real_data" / f"{index}.png").write_bytes(b"figure")
    (work / "verdicts" / "top 1 (%)" / "steps.svg").write_text("<svg/>")
    report.copy_figures(work, out, copied)
    assert copied == ["verdicts-top_1____-steps.svg", "real_data-0.png", "real_data-1.png"]
    # A later part has one of its own, and the verdicts' report has a place in any case.
    (work / "ratios" / "bench.png").write_bytes(b"bars")
    (work / "verdicts" / "report.html").write_text("<p>")
    report.copy_figures(work, out, copied)
    assert copied[3:] == ["verdicts-report.html"]
    (work / "ratios" / "large.png").write_bytes(os.urandom(200_000))
    (work / "small.json").write_text("{}")
    (work / "weights.pt").write_bytes(b"not a record")
    assert report.write_archive(work, out) == ["ratios/large.png"]
    names = archived(out)
    assert "small.json" in names and "weights.pt" not in names
    step = ended_step(tmp_path, 0) | {"record": "r" * 90_000}
    both = {name: {"steps": [step]} for name in ("one", "two")}
    report.write_summary(SUMMARY | {"parts": both}, out)
    assert json.loads((out / "gpu_check.json").read_text())["parts"]["one"]["steps"]
    (out / report.UNFINISHED).write_text("a kill came just then")
    assert_within_limits(out, largest=100_000)


def test_a_summary_says_where_the_runtime_is_a_fake(tmp_path):

    def found(*names):
        record = {"gpus": [{"name": name} for name in names]}
        steps = {"environment": {"steps": [{"name": "doctor", "record": record}]}}
        return report.device_of({"parts": steps}, "cuda")

    assert (found("NVIDIA H200"), found()) == ("NVIDIA H200", "cpu")
    assert report.device_of({"parts": {}}, "cuda") == "cuda"  # not known yet
    for name in ("NVIDIA H200 (shim)", "Fake H200"):
        report.write_summary(SUMMARY | {"device": found(name)}, tmp_path)
        lines = (tmp_path / "gpu_check.md").read_text().splitlines()
        assert lines[0] == "# gpu_check on no GPU: a fake CUDA runtime, host side only: done"
        assert lines[2].startswith("**No value and no time on this page means anything**")


def archived(out):
    """The names in the archive, which is whole."""
    with tarfile.open(out / "records.tar.gz") as archive:
        names = archive.getnames()
        assert all(archive.extractfile(name).read() is not None for name in names)
    return names


def assert_within_limits(out, largest=16 * 2**20):
    """Check the limits of a machine that hands back what a call has left."""
    files = list(out.iterdir())
    assert len(files) <= 8 and all(path.is_file() for path in files)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", path.name) for path in files)
    assert max(path.stat().st_size for path in files) <= largest


# The script with parts that take no time. A file in `work` says that a step is under way.
TINY = """
import runpy, sys
sys.path.insert(0, {scripts!r})
import gpu_check_parts as parts, gpu_check_processes as processes

def step(name, code):
    return lambda setting, seconds: [
        processes.Step(name, [sys.executable, "-uc", code.format(work=str(setting.work))])
    ]

processes.LOOK_EVERY_S = 0.1
machine = "import pathlib; pathlib.Path('{{work}}/one.json').write_text('[1]'); print('one')"
hanging = "import os, time; print('pid', os.getpid()); time.sleep(600)"
chosen = dict(
    environment=step("doctor", hanging if "at_once" in sys.argv else machine),
    memory=step("two", "print('two')"),
    gpt=step("three", hanging),
)
for name, steps in chosen.items():
    parts.PARTS[name] = parts.Part(1, steps, together=name == "gpt")
sys.argv = ["gpu_check", sys.argv[1]]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before a step ended", "after a part", "within a part"])
def test_a_kill_leaves_what_was_done_and_nothing_running(tmp_path, moment):
    """SIGKILL: nothing of the script runs after it."""
    out, code = tmp_path / "out", TINY.format(scripts=str(ROOT / "scripts"), script=str(SCRIPT))
    more = ["at_once"] if moment == "before a step ended" else []
    # The interpreter is the right one: it is not to start the script itself in its place.
    settings = variables(PARTS="memory,gpt", GPU_CHECK_PYTHON=sys.executable)
    settings["TMPDIR"] = str(tmp_path)
    command = [sys.executable, "-c", code, str(out), *more]
    with subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "gpt: three" in line or more:
                break
        if moment != "after a part":
            assert waited_for(lambda: (out / "gpu_check.md").exists() and pid_in(out))
        process.kill()
    record, names = json.loads((out / "gpu_check.json").read_text()), archived(out)
    assert record["status"] == "running"
    assert_within_limits(out)
    told = record["parts"].items()
    ended = {name: [step["status"] for step in part["steps"]] for name, part in told}
    if moment == "before a step ended":
        assert ended == {"environment": ["running"]}
    else:
        assert ended.pop("gpt", ["running"]) in ([], ["running"])
        assert ended == {"environment": ["done"], "memory": ["done"]}
        assert record["parts"]["memory"]["steps"][0]["text"] == "two"
        assert {"one.json", "two.out.txt"} <= set(names)
    if moment != "after a part":
        assert waited_for(lambda: not alive(pid_in(out)))


def pid_in(out):
    """Return the process of the step that hangs, from what the summary has of its output."""
    found = re.search(r"^pid (\d+)$", (out / "gpu_check.md").read_text(), re.MULTILINE)
    return int(found[1]) if found else None


def waited_for(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_a_part_begins_only_with_its_least_time_and_its_steps_share_it(monkeypatch, tmp_path):
    """A part has the time that earlier ones leave; parallel steps have all of it."""
    script = runpy.run_path(str(SCRIPT))
    limits = []

    def ended(step, limit, folder, environment):
        limits.append((step.name, round(limit)))
        own = {"step": step, "limit": limit, "out": folder / "o", "err": folder / "e"}
        return SimpleNamespace(**own, ended=True, code=0, seconds=1.0, check=lambda: None)

    spaces = script["_run_part"].__globals__
    monkeypatch.setitem(spaces, "Running", ended)
    monkeypatch.setitem(spaces, "wait_for", lambda running, look: look())
    command = processes.Step("a", ["none"], most=20), processes.Step("b", ["none"])
    chosen = {"environment": parts.Part(60, lambda *_: [*command], together=True)}
    chosen |= {"memory": parts.Part(40, lambda *_: [*command])}
    chosen |= {"gpt": parts.Part(1e-9, lambda *_: [*command], least=400)}
    monkeypatch.setattr(parts, "PARTS", parts.PARTS | chosen)
    monkeypatch.setitem(spaces, "PARTS", parts.PARTS)
    setting = parts.Setting(tmp_path, "cpu", None, tuple(chosen), script["_facts"]())
    (tmp_path / "out").mkdir()
    assert script["_run"](setting, 220.0, tmp_path / "out") == 0
    assert limits == [("a", 20), ("b", 120), ("a", 20), ("b", 200)]
    text = (tmp_path / "out" / "gpu_check.md").read_text()
    assert "| gpt | | not begun, no time was left |" in text and "- torch: 2." in text


ABOUT = {
    "METADATA": "Metadata-Version: 2.1\nName: only-in-a-wheel\nVersion: 1\n",
    "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}


@pytest.mark.slow
def test_wheels_are_there_for_every_step_and_nowhere_else(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", "/before")
    assert not wheels.install_wheels(tmp_path, str(tmp_path))
    assert "no wheels there" in capfd.readouterr().err
    with zipfile.ZipFile(tmp_path / "only_in_a_wheel-1-py3-none-any.whl", "w") as made:
        made.writestr("only_in_a_wheel.py", "found = 7\n")
        for name, content in ABOUT.items():
            made.writestr(f"only_in_a_wheel-1.dist-info/{name}", content)
    assert wheels.install_wheels(tmp_path, str(tmp_path / "temporary"))
    command = [sys.executable, "-c", "import only_in_a_wheel as w; print(w.found, w.__file__)"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.startswith(f"7 {tmp_path}/temporary/site/")
    assert os.environ["PYTHONPATH"].endswith(":/before")


@pytest.mark.parametrize("grain", ["gpu_check.json", "gpu_check.md", "records.tar.gz"])
def test_a_kill_while_a_file_is_written_leaves_the_one_before(tmp_path, monkeypatch, grain):
    summary = SUMMARY | {"status": "running"}
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir(), out.mkdir()

    def leave():
        report.write_archive(work, out)
        report.write_summary(summary, out)

    leave()
    before = (out / grain).read_bytes()
    own = os.replace

    def killed(source, target):
        if Path(target).name == grain:
            raise SystemExit
        own(source, target)

    monkeypatch.setattr(os, "replace", killed)
    summary["status"] = "done"
    (work / "more.json").write_text("{}")
    with pytest.raises(SystemExit):
        leave()
    assert (out / grain).read_bytes() == before


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "environment, told",
    [
        ({"PARTS": "tests,benhc"}, "PARTS=benhc: one of first, verdicts, gpt, peers, ranks, en"),
        ({"PARTS": "data"}, "PARTS=data: needs the folder"),
        ({"DEVICE": "tpu"}, "DEVICE=tpu: cuda, or cpu"),
        ({"LIMIT": "soon"}, "LIMIT=soon: seconds"),
        ({"LIMIT": "20"}, "more than 40"),
        ({}, "name a new folder"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, environment, told):
    """Before a folder is made; results that are there are not written over."""
    out = tmp_path / "out"
    if not environment:
        out.mkdir()
        (out / "gpu_check.json").write_text("{}")
    done = gpu_check(out, **environment)
    assert done.returncode == 2
    assert told in done.stderr and done.stderr.count("\n") == 1
    if environment:
        assert not out.exists()
    else:
        assert [path.read_text() for path in out.iterdir()] == ["{}"]


def test_help_names_every_part_and_every_call():
    text = gpu_check("--help").stdout
    assert all(f"({name})" in text for name in parts.PARTS)
    assert all(re.search(rf"^{name} ", text, re.MULTILINE) for name in parts.CALLS)
    assert gpu_check().returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_leaves_nothing(tmp_path):
    done = gpu_check(tmp_path / "out", DEVICE="cuda")
    assert done.returncode == 2
    assert "DEVICE=cpu is a dry run" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_of_every_part_with_one_that_fails(tmp_path):
    """Real code at its smallest size; the folder of real data is empty, so that part fails."""
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    settings = {"PARTS": "first,verdicts,gpt,peers,ranks", "LIMIT": "2300"}
    settings |= {"MPRUN_COMMIT": "abc123"}
    done = gpu_check(out, tmp_path / "empty", timeout=2300, **settings)
    record = json.loads((out / "gpu_check.json").read_text())
    assert done.returncode == 1, done.stdout + done.stderr
    assert list(record["parts"]) == list(parts.PARTS)
    steps = {s["name"]: s for part in record["parts"].values() for s in part["steps"]}
    ended = {name: step["status"] for name, step in steps.items()}
    assert ended.pop("real_data").startswith("failed"), steps["real_data"]
    assert set(ended.values()) == {"done"}, {n: steps[n]["errors"] for n in ended}
    assert record["machine"]["commit"] == "abc123"
    assert steps["doctor"]["record"]["machine"]["packages"]["torch"]
    names = [name for name in steps if name.startswith("tests")]
    assert len(names) == 3 and all(steps[name]["record"]["skipped"] > 0 for name in names)
    assert steps["fidelity"]["record"]["rows"]
    text = (out / "gpu_check.md").read_text()
    assert text.startswith("# gpu_check on cpu: a part failed or overran\n")
    assert "- commit: abc123\n" in text
    assert "| quickstart_underflow" in text.replace("| results | ", "| ")
    assert all(f"\n## {heading}\n" in text for heading in record["parts"])
    assert "float16: emulation on the CPU against native" in text
    left = {path.name for path in out.iterdir()}
    assert {"gpu_check.md", "gpu_check.json", "records.tar.gz"} < left
    assert any(name.endswith(".png") for name in left)
    assert_within_limits(out)
    names = archived(out)
    assert any(name.endswith("metrics.jsonl") for name in names)
    assert "real_data.err.txt" in names


@pytest.mark.slow
def test_whoever_ends_it_gets_what_there_is(tmp_path):
    """A caller's own time limit sends SIGTERM."""
    out = tmp_path / "out"
    command, settings = [sys.executable, SCRIPT, str(out)], variables(PARTS="results,tests")
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
    assert [s["status"] for s in record["parts"]["environment"]["steps"]] == ["done"]
    assert "tests" not in record["parts"]
    assert (out / "records.tar.gz").exists()
