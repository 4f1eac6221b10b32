"""How ranks are started: by mprun, by torchrun, by srun; stopped, started again, continued."""

import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mprun.distributed.group import RankGroup
from mprun.distributed.launch import _judged
from mprun.distributed.rank_info import RankInfo
from mprun.errors import RankFailed
from mprun.record import checkpoint
from mprun.record.run_directory import locked

from ..helpers import record_of, refused, rows_of
from .of_a_rank import digest, environment_of
from .processes import children_of, mprun, start, with_word
from .test_faults import arguments_of, faulty
from .test_same_bits import free_port

FACTORY = "model.factory=tests.distributed.of_a_rank:small"
EXACT = [
    *("device=cpu", "threads=1", "model=custom", FACTORY, "data=digits_32", "data.batch_size=4"),
    *("train.accumulate=4", "dist.order=fixed", "precision=fp16_master_scaled"),
    "train.checkpoint_every=5",
]
LM = ["device=cpu", "threads=1", "model=lstm_lm", "data=synthetic_tokens", "train.steps=5"]
ENDLESS = [*EXACT, "devices=2", "train.steps=100000"]


def started_and_training(directory):
    """A run of two ranks that has taken some steps."""
    process = start(*ENDLESS, f"output_dir={directory}")
    while not (directory / "metrics.jsonl").exists() or len(rows_of(directory)) < 10:
        assert process.poll() is None
        time.sleep(0.2)
    return process


def state_of(directory):
    found = checkpoint.load_newest(directory / "checkpoints", torch.device("cpu"))
    return found.step, digest(found.state["task"])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_saved_at_one_number_of_ranks_resumed_at_another(world, tmp_path):
    straight = tmp_path / "straight"
    assert mprun(*EXACT, "train.steps=12", f"output_dir={straight}").returncode == 0
    for other in (1, 2, 4):
        own = tmp_path / f"devices={other}"
        begun = mprun(*EXACT, "train.steps=5", f"devices={world}", f"output_dir='{own}'")
        assert begun.returncode == 0, begun.stderr
        assert begun.stdout == f"run: {own}\n" and not (own / "ranks").exists()
        ranks = record_of(own)["ranks"]
        assert world == 1 or (ranks["world"], ranks["backend"]) == (world, "gloo")
        resumed = mprun(f"resume={own}", f"devices={other}", FACTORY, "train.steps=12")
        assert resumed.returncode == 0, resumed.stderr
        assert state_of(own) == state_of(straight)
        assert record_of(own)["config_hash"] == record_of(straight)["config_hash"]
        assert (record_of(own)["ranks"] is None) == (other == 1)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_asked_to_stop_all_ranks_stop_after_one_step(number, code, tmp_path):
    process = started_and_training(tmp_path / "run")
    process.send_signal(number)
    assert process.wait(15) == code
    record = record_of(tmp_path / "run")
    assert (record["status"], record["cause"]) == ("preempted", number.name)
    assert state_of(tmp_path / "run")[0] == record["last_step"]
    assert not (tmp_path / "run" / "ranks").exists()


@pytest.mark.slow
def test_lost_ranks_are_started_again_from_the_last_checkpoint(tmp_path):
    plain = mprun(*arguments_of("killed", tmp_path / "plain"), **faulty("none:none", tmp_path))
    assert plain.returncode == 0, plain.stderr
    again = [*arguments_of("killed", tmp_path / "again"), "restarts=1", "train.checkpoint_every=3"]
    ended = mprun(*again, **faulty("killed:training", tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "rank 1 was killed (SIGKILL)" in ended.stderr
    one, other = record_of(tmp_path / "plain"), record_of(tmp_path / "again")
    assert other["attempts"] == 2
    assert one["final"] == other["final"]


@pytest.mark.slow
def test_what_diverged_is_not_started_again(tmp_path):
    arguments = [*arguments_of("nan", tmp_path / "run"), "restarts=3"]
    assert mprun(*arguments, **faulty("nan:training", tmp_path)).returncode == 3
    assert record_of(tmp_path / "run")["attempts"] == 1


def torchrun(*options):
    port = str(free_port())
    return ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, *options)


@pytest.mark.slow
def test_torchrun(tmp_path):
    before = (*torchrun(), "-m", "mprun")
    ended = mprun(*LM, f"output_dir={tmp_path / 'run'}", before=before)
    assert ended.returncode == 0, ended.stderr
    assert record_of(tmp_path / "run")["ranks"]["world"] == 2
    ended = mprun(*LM, "devices=4", f"output_dir={tmp_path / 'no'}", before=before)
    assert "devices=4: the environment has 1 x 2 ranks" in ended.stderr
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "ended"), [("killed", 0, ("done", 2)), ("nan", 1, ("diverged", 1))]
)
def test_torchrun_starts_again_what_was_lost_and_not_what_diverged(kind, code, ended, tmp_path):
    """With a store of its own for each attempt: the shared one is not found again (torch 2.15)."""
    arguments = [a for a in arguments_of(kind, tmp_path / "run") if not a.startswith("devices")]
    before = (*torchrun("--max-restarts", "2"), "-m", "mprun")
    own = faulty(f"{kind}:training", tmp_path) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = mprun(*arguments, "train.checkpoint_every=3", before=before, **own)
    assert done.returncode == code, done.stderr
    record = record_of(tmp_path / "run")
    assert (record["status"], record["attempts"]) == ended


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_srun(devices, tmp_path):
    """Two tasks: two ranks of one machine, or two machines that start two each."""
    processes, port, job = [], free_port(), free_port()
    for task in range(2):
        machines = {"SLURM_NODEID": task, "SLURM_LOCALID": 0, "SLURM_NNODES": 2}
        ranks = {"SLURM_NODEID": 0, "SLURM_LOCALID": task, "SLURM_NNODES": 1}
        own = machines if devices == 2 else ranks
        own |= {"SLURM_STEP_ID": 0, "SLURM_PROCID": task, "SLURM_NTASKS": 2}
        own |= {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": port}
        words = [*LM, f"output_dir={tmp_path / 'run'}"]
        words += ["devices=2", "nodes=2"] if devices == 2 else []
        processes.append(start(*words, stderr=subprocess.PIPE, **own))
    for process in processes:
        _, stderr = process.communicate(timeout=180)
        assert process.returncode == 0, stderr
    assert record_of(tmp_path / "run")["ranks"]["world"] == 2 * devices


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
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.5])
def test_asked_to_stop_before_there_is_a_run(number, code, after_s, tmp_path):
    process = start(*EXACT, "devices=2", f"output_dir={tmp_path / 'run'}")
    while not children_of(process.pid):
        time.sleep(0.01)
    time.sleep(after_s)
    process.send_signal(number)
    assert process.wait(15) == code
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_another_command_holds_is_not_gone_on_with(tmp_path):
    begun = mprun(*EXACT, "train.steps=5", "devices=2", f"output_dir={tmp_path / 'run'}")
    assert begun.returncode == 0
    with locked(tmp_path / "run"):
        ended = mprun(f"resume={tmp_path / 'run'}", FACTORY, "train.steps=8")
    assert ended.returncode == 2
    assert "in use by another process" in ended.stderr


@pytest.mark.slow
def test_ranks_of_different_configurations_do_not_meet(tmp_path):
    port, run = free_port(), f"output_dir={tmp_path / 'run'}"
    processes = [
        start(*LM, f"seed={rank}", run, stderr=subprocess.PIPE, **environment_of(rank, 2, port))
        for rank in range(2)
    ]
    for process in processes:
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 2, stderr
        assert "the ranks have different configurations" in stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("codes", "word", "asked", "ends"),
    [
        ([3, 3], None, 0, (3, None)),
        ([5, 4], None, 0, (4, None)),  # files are damaged; who lost the other ran out of ranks
        ([4, 4], (1, 4, "bad file"), 0, (4, None)),
        ([None, 4], (1, 4, "bad file"), 0, (4, "rank 1: bad file")),  # 0 had no time to say it
        ([0, -9], None, 0, (5, "rank 1 was killed (SIGKILL)")),
        ([130, -2], None, signal.SIGINT, (130, None)),
        ([75, 75], None, signal.SIGTERM, (75, None)),
    ],
)
def test_a_run_ends_with_the_code_of_the_rank_that_failed(codes, word, asked, ends):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    if word is not None:
        rank, *said = word
        RankGroup.fail(SimpleNamespace(store=store, rank=rank), *said)
    place = RankInfo(None, 0, 0, 1, 2, "127.0.0.1", 0, served=True)
    assert _judged(dict(enumerate(codes)), store, place, asked) == ends


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
        ([*EXACT, "train.accumulate=1000", "devices=1000"], "devices=1000: this machine has"),
    ],
)
def test_what_is_not_started(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "-m" in words:
        for name, value in environment_of(0, 2, 29500).items():
            monkeypatch.setenv(name, value)
    refused(capsys, *words, says=told)
    assert list(tmp_path.iterdir()) == []
