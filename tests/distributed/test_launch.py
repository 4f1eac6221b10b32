"""How ranks are started: by mprun, by torchrun, by srun; stopped, started again, continued."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mprun.distributed import store
from mprun.distributed.group import RankGroup
from mprun.distributed.launch import _judged
from mprun.distributed.rank_info import RankInfo, earlier_attempt, final_code, launched_by
from mprun.errors import BadInput, RankFailed
from mprun.record import checkpoint
from mprun.record.run_directory import claim, claimed_before, locked

from ..helpers import but, record_of, refused, rows_of
from .of_a_rank import digest, environment_of
from .processes import children_of, done, ended, mprun, start, with_word
from .test_faults import arguments_of, faulty
from .test_same_bits import free_port

FACTORY = "model.factory=tests.distributed.of_a_rank:small"
EXACT = [
    *("device=cpu", "threads=1", "model=custom", FACTORY, "data=digits_32", "data.batch_size=4"),
    *("train.accumulate=4", "dist.order=fixed", "precision=fp16_master_scaled"),
    "train.checkpoint_every=5",
]
LM = ["device=cpu", "threads=1", "model=lstm_lm", "data=synthetic_tokens", "train.steps=5"]
ENDLESS = [*EXACT, "train.steps=100000"]


def wait_for_steps(directory, processes):
    """Wait until a run has taken some steps."""
    while not (directory / "metrics.jsonl").exists() or len(rows_of(directory)) < 10:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.2)


def started_and_training(directory):
    """A run of two ranks that has taken some steps."""
    process = start(*ENDLESS, "devices=2", f"output_dir={directory}")
    wait_for_steps(directory, [process])
    return process


def state_of(directory):
    found = checkpoint.load_newest(directory / "checkpoints", torch.device("cpu"))
    return found.step, digest(found.state["task"])


def resumed_elsewhere(own, tmp_path, first, then, steps):
    """The records of a run and of one that ended alike: saved with `first`, resumed with `then`.

    steps: of its first part and of all.
    """
    straight, parted = tmp_path / "straight", tmp_path / "parted"
    part, whole = (f"train.steps={number}" for number in steps)
    done(*own, whole, f"output_dir={straight}")
    done(*own, part, *first, f"output_dir={parted}")
    done(f"resume={parted}", *then, whole)
    assert state_of(parted) == state_of(straight)
    assert record_of(parted)["final"] == record_of(straight)["final"]
    return record_of(parted), record_of(straight)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_saved_at_one_number_of_ranks_resumed_at_another(world, tmp_path):
    straight = tmp_path / "straight"
    done(*EXACT, "train.steps=12", f"output_dir={straight}")
    for other in (1, 2, 4):
        own = tmp_path / f"devices={other}"
        begun = done(*EXACT, "train.steps=5", f"devices={world}", f"output_dir='{own}'")
        assert begun.stdout == f"run: {own}\n" and not (own / "ranks").exists()
        ranks = record_of(own)["ranks"]
        assert world == 1 or (ranks["world"], ranks["backend"]) == (world, "gloo")
        done(f"resume={own}", f"devices={other}", FACTORY, "train.steps=12")
        assert state_of(own) == state_of(straight)
        assert record_of(own)["config_hash"] == record_of(straight)["config_hash"]
        assert (record_of(own)["ranks"] is None) == (other == 1)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_asked_to_stop_all_ranks_stop_after_one_step(number, code, tmp_path):
    process = started_and_training(tmp_path / "run")
    process.send_signal(number)
    assert process.wait(120) == code
    record = record_of(tmp_path / "run")
    assert (record["status"], record["cause"]) == ("preempted", number.name)
    assert state_of(tmp_path / "run")[0] == record["last_step"]
    assert not (tmp_path / "run" / "ranks").exists()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The record of the run that meets faults elsewhere."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done(*arguments_of("killed", folder / "run"), **faulty("none:none", folder))
    return record_of(folder / "run")


@pytest.mark.slow
def test_lost_ranks_are_started_again_from_the_last_checkpoint(undisturbed, tmp_path):
    again = [*arguments_of("killed", tmp_path / "again"), "restarts=1", "train.checkpoint_every=3"]
    said = done(*again, **faulty("killed:training", tmp_path)).stderr
    assert "rank 1 was killed (SIGKILL)" in said
    record = record_of(tmp_path / "again")
    assert record["attempts"] == 2
    assert record["final"] == undisturbed["final"]


@pytest.mark.slow
def test_what_diverged_is_not_started_again(tmp_path):
    arguments = [*arguments_of("nan", tmp_path / "run"), "restarts=3"]
    done(*arguments, code=3, **faulty("nan:training", tmp_path))
    assert record_of(tmp_path / "run")["attempts"] == 1


def torchrun(rendezvous="static", restarts=0):
    options = {
        "static": ("--master-port", str(free_port())),
        "c10d": ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
        "standalone": ("--standalone",),
    }[rendezvous]
    before = ("-m", "torch.distributed.run", "--nproc-per-node", "2", *options)
    return (*before, "--max-restarts", str(restarts), "-m", "mprun")


def torchruns(kind, output, tmp_path, **more):
    """The errors of a run whose rank meets a fault in its training, with checkpoints."""
    own = [word for word in arguments_of(kind, "") if not word.startswith(("devices", "output_"))]
    own += ["train.checkpoint_every=3", output]
    return done(*own, **faulty(f"{kind}:training", tmp_path), **more).stderr


@pytest.mark.slow
def test_torchrun(tmp_path):
    before = torchrun()
    done(*LM, f"output_dir={tmp_path / 'run'}", before=before)
    assert record_of(tmp_path / "run")["ranks"]["world"] == 2
    said = mprun(*LM, "devices=4", f"output_dir={tmp_path / 'no'}", before=before).stderr
    assert "devices=4: the environment has 1 x 2 ranks" in said
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rendezvous", "own_store", "rank"),
    [("static", 0, 1), ("c10d", 0, 0), ("c10d", 1, 1), ("standalone", 1, 0), ("standalone", 0, 1)],
)
def test_torchrun_starts_lost_ranks_again(rendezvous, own_store, rank, undisturbed, tmp_path):
    """own_store: the store of an attempt is gone with its rank 0."""
    output, before = f"output_root={tmp_path / 'runs'}", torchrun(rendezvous, restarts=2)
    more = {"FAULT_RANK": rank, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": own_store}
    torchruns("killed", output, tmp_path, before=before, **more)
    (directory,) = (path.parent for path in (tmp_path / "runs").rglob("run.json"))
    record = record_of(directory)
    assert (record["status"], record["attempts"], record["exit_code"]) == ("done", 2, 0)
    assert record["final"] == undisturbed["final"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "status"), [("nan", "diverged"), ("damaged", "failed")])
def test_torchrun_does_not_train_again_what_would_end_alike(kind, status, tmp_path):
    output, before = f"output_dir={tmp_path / 'run'}", torchrun("standalone", restarts=2)
    said = torchruns(kind, output, tmp_path, before=before, code=1)
    record = record_of(tmp_path / "run")
    assert (record["status"], record["attempts"]) == (status, 1)
    assert record["exit_code"] == {"nan": 3, "damaged": 4}[kind]
    told = [line for line in said.splitlines() if "not started again" in line]
    assert told == [f"mprun: {tmp_path / 'run'}: not started again: {record['cause']}"] * 2


@pytest.mark.slow
def test_another_torchrun_does_not_go_on_with_the_run(tmp_path):
    output, before = f"output_dir={tmp_path / 'run'}", torchrun("static", restarts=1)
    torchruns("none", output, tmp_path, before=before)
    begun = record_of(tmp_path / "run")
    said = torchruns("none", output, tmp_path, before=before, code=1)
    # The line of each rank; of a long path only the ends are printed.
    assert len(re.findall(r"output_dir=\S+/run: already exists", said)) >= 2
    assert record_of(tmp_path / "run") == begun


def test_the_attempt_before_is_found_by_its_torchrun(tmp_path, monkeypatch):
    folder = "/tmp/torchelastic_x/none_{}/attempt_{}/0/error.json"
    ours = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": folder.format("a", 1)}
    before = ours | {"TORCHELASTIC_ERROR_FILE": folder.format("a", 0)}
    other = ours | {"TORCHELASTIC_ERROR_FILE": folder.format("b", 1)}
    assert launched_by(ours) == launched_by(before) != launched_by(other)
    assert launched_by({}) is None and launched_by({"TORCHELASTIC_RUN_ID": "7"}).startswith("7_")
    places = [claim(tmp_path, "run") for _ in range(4)]
    for number, (place, by) in enumerate(zip(places, (other, before, other, ours), strict=True)):
        (place / "run.json").write_text(json.dumps({"launched_by": [launched_by(by)]}))
        os.utime(place, (number, number))
    (places[3] / "run.json").write_text("cut sho")  # of a disk that was full
    (tmp_path / "run.more").mkdir()
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    newest_first = claimed_before(tmp_path, "run")
    assert newest_first == places[::-1]
    assert earlier_attempt(newest_first)[0] == places[1]
    assert earlier_attempt(newest_first[:2]) is None


@pytest.mark.parametrize(
    ("record", "code"),
    [
        ({"status": "running"}, None),
        ({"status": "failed", "exit_code": 5}, None),
        ({"status": "preempted", "exit_code": 75}, None),
        ({"status": "failed", "exit_code": 1}, None),
        ({"status": "failed", "exit_code": 4}, 4),
        ({"status": "failed", "exit_code": 2}, 2),
        ({"status": "diverged"}, 3),  # of an earlier version
        ({"status": "done", "exit_code": 0}, 0),
    ],
)
def test_which_attempts_are_repeated(record, code):
    assert final_code(record) == code


def srun(words, devices=1, each=({}, {}), **more):
    """Two tasks: two ranks of one machine, or two machines that start two each.

    each: variables of either task; more: of both.
    """
    processes, job = [], free_port()
    for task in range(2):
        machines = {"SLURM_NODEID": task, "SLURM_LOCALID": 0, "SLURM_NNODES": 2}
        ranks = {"SLURM_NODEID": 0, "SLURM_LOCALID": task, "SLURM_NNODES": 1}
        own = machines if devices == 2 else ranks
        own |= {"SLURM_STEP_ID": 0, "SLURM_PROCID": task, "SLURM_NTASKS": 2}
        own |= {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "localhost"} | more | each[task]
        given = ["devices=2", "nodes=2"] if devices == 2 else []
        processes.append(start(*words, *given, stderr=subprocess.PIPE, **own))
    return processes


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_srun_on_a_taken_port(devices, tmp_path):
    """A stranger's server takes every connection, and never answers."""
    with socket.create_server(("", 0)) as stranger:
        port = stranger.getsockname()[1]
        processes = srun([*LM, f"output_dir={tmp_path / 'run'}"], devices, MASTER_PORT=port)
        assert not any(".cpp" in said for said in ended(processes, 0, timeout=180))
    assert record_of(tmp_path / "run")["ranks"]["world"] == 2 * devices


def test_the_machine_that_serves_the_store_ends_last():
    """The launchers of the others still read the run's directory there."""
    served = RankInfo(0, 0, 0, 2, 1, "127.0.0.1", free_port(), served=False)
    own = store.store_of(served, host=True)
    other = store.store_of(replace(served, node=1), host=False)
    own.set("mprun/directory", "outputs/run")
    read = []

    def reads_late():
        time.sleep(0.3)
        read.append(store.directory_in(other))
        store.leave(other, False, 2, 0.0)

    thread = threading.Thread(target=reads_late)
    thread.start()
    store.leave(own, True, 2, 30.0)
    assert read == ["outputs/run"]
    thread.join()
    del own  # who serves it may be killed instead
    assert store.directory_in(other) is None


def test_ranks_pass_by_the_servers_of_others(monkeypatch):
    monkeypatch.setattr(store, "_ANSWER_S", 0.2)
    with socket.create_server(("", 0)) as silent:
        port = silent.getsockname()[1]
        first = RankInfo(0, 0, 0, 1, 2, "127.0.0.1", port, served=False, job="7.0")
        another = store.store_of(replace(first, job="8.0"), host=True)  # at the second port
        own = store.store_of(first, host=True)
        own.set("whose", "ours")
        another.set("whose", "theirs")
        for job, whose in (("7.0", b"ours"), ("8.0", b"theirs")):
            assert store.store_of(replace(first, job=job), host=False).get("whose") == whose


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [[0, 1], [1]])
def test_srun_asked_to_stop_before_its_time_limit(tasks, tmp_path):
    directory = tmp_path / "run"
    processes = srun([*ENDLESS, f"output_dir={directory}"], MASTER_PORT=free_port())
    wait_for_steps(directory, processes)
    for task in tasks:
        processes[task].send_signal(signal.SIGTERM)
    ended(processes, 75)
    record = record_of(directory)
    assert (record["status"], record["exit_code"]) == ("preempted", 75)
    assert state_of(directory)[0] == record["last_step"]


@pytest.mark.slow
def test_srun_a_rank_that_hangs_ends_by_itself(tmp_path):
    """Nobody watches the tasks from outside: the hung one has a thread that does."""
    own = [word for word in arguments_of("hung", tmp_path / "run") if word != "devices=2"]
    more = faulty("hung:training", tmp_path) | {"MASTER_PORT": free_port()}
    ended(srun(own, **more), 5)
    assert record_of(tmp_path / "run")["cause"] == "rank 1: no answer for 8 s (dist.timeout_s)"


def test_late_ranks(monkeypatch):
    """Rank 1 waits in its fourth exchange for rank 2, which is alive; then rank 3 dies."""
    kept = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    begun, number = {0: 4, 1: 4, 2: 3, 3: 4}, itertools.count()

    def beats(seconds=0.0):
        for rank, exchanges in begun.items():
            store.beat(kept, rank, next(number), exchanges)

    beats()
    monkeypatch.setattr(store.time, "sleep", beats)
    assert store.late_ranks(kept, 4, own=1) == [2]
    begun[2] = 4
    assert store.late_ranks(kept, 4, own=1) == []
    del begun[3]
    assert store.late_ranks(kept, 4, own=1) == [3]


def test_two_ranks_on_one_gpu():
    """The exchange alone is made: both ranks of a machine see the same GPU."""
    rank = SimpleNamespace(all_hosts=["a", "a"], device_name="GPU-1", world=2)
    rank.all_of = lambda own: [own, own]
    with pytest.raises(BadInput, match="ranks 0 and 1 have the same GPU of a"):
        RankGroup._check_gpus(rank)
    rank.all_of = lambda own: [own, "GPU-2"]
    RankGroup._check_gpus(rank)


@pytest.mark.slow
def test_ranks_end_with_who_started_them(tmp_path):
    process = started_and_training(tmp_path / "run")
    process.kill()
    process.wait()
    until, word = time.monotonic() + 15, f"output_dir={tmp_path / 'run'}"
    while with_word(word) and time.monotonic() < until:
        time.sleep(0.2)
    assert with_word(word) == []
    assert record_of(tmp_path / "run")["status"] == "preempted"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.5])
def test_asked_to_stop_before_there_is_a_run(number, code, after_s, tmp_path):
    process = start(*EXACT, "devices=2", f"output_dir={tmp_path / 'run'}")
    while not children_of(process.pid):
        time.sleep(0.01)
    time.sleep(after_s)
    process.send_signal(number)
    assert process.wait(120) == code
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_another_command_holds_is_not_gone_on_with(tmp_path):
    done(*EXACT, "train.steps=5", "devices=2", f"output_dir={tmp_path / 'run'}")
    with locked(tmp_path / "run"):
        second = done(f"resume={tmp_path / 'run'}", FACTORY, "train.steps=8", code=2)
    assert "in use by another process" in second.stderr


@pytest.mark.slow
def test_ranks_of_different_configurations_do_not_meet(tmp_path):
    port, run = free_port(), f"output_dir={tmp_path / 'run'}"
    processes = [
        start(*LM, f"seed={rank}", run, stderr=subprocess.PIPE, **environment_of(rank, 2, port))
        for rank in range(2)
    ]
    for said in ended(processes, 2):
        assert "the ranks have different configurations" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("codes", "word", "asked", "ends"),
    [
        ([3, 3], None, 0, (3, None)),
        ([5, 4], None, 0, (4, None)),  # files are damaged; who lost the other ran out of ranks
        ([4, 4], (1, 4, "bad file"), 0, (4, None)),
        ([None, 4], (1, 4, "bad file"), 0, (4, "rank 1: bad file")),  # 0 had no time to say it
        ([0, -9], None, 0, (5, "rank 1 was killed (SIGKILL)")),
        ([-6, None], None, 0, (5, "rank 1 did not answer, and was killed")),  # 0: by NCCL
        ([-6, 5], (1, 5, "no answer"), 0, (5, "rank 1: no answer")),
        ([5, -9], (1, 5, "no answer for 8 s"), 0, (5, None)),
        ([5, -9], (1, 5, "lost contact"), 0, (5, "rank 1 was killed (SIGKILL)")),
        ([130, -2], None, signal.SIGINT, (130, None)),
        ([75, 75], None, signal.SIGTERM, (75, None)),
    ],
)
def test_a_run_ends_with_the_code_of_the_rank_that_failed(codes, word, asked, ends):
    kept = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    if word is not None:
        rank, *said = word
        RankGroup.fail(SimpleNamespace(store=kept, rank=rank), *said)
    place = RankInfo(None, 0, 0, 1, 2, "127.0.0.1", 0, served=True)
    assert _judged(dict(enumerate(codes)), kept, place, asked) == ends


def test_what_fails_on_one_rank_fails_on_all_with_its_code():
    """The exchange alone is made: this is rank 0, and rank 1 has damaged files."""
    rank_0 = SimpleNamespace(rank=0, all_of=lambda own: [own, ("bad file", 4)])
    with pytest.raises(RankFailed, match="rank 1: bad file") as failed:
        RankGroup.together(rank_0, lambda: "built")
    assert failed.value.exit_code == 4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-m", *LM, "seed=0,1"], "a sweep starts the ranks of its runs itself"),
        (but(EXACT, "train.accumulate=1000", "devices=1000"), "devices=1000: this machine has"),
    ],
)
def test_what_is_not_started(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "-m" in words:
        for name, value in environment_of(0, 2, 29500).items():
            monkeypatch.setenv(name, value)
    refused(capsys, *words, says=told)
    assert list(tmp_path.iterdir()) == []
