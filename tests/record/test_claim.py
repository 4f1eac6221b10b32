"""A run directory belongs to one run: claims, names, hashes."""

import re
import subprocess
import sys
import threading

import pytest

from mprun.config.compose import compose_config
from mprun.record.keys import config_hash
from mprun.record.run_directory import claim, write_json


def test_threads_that_claim_one_name_get_one_directory_each(tmp_path):
    got, barrier = [], threading.Barrier(8)

    def work():
        barrier.wait()
        for _ in range(20):
            got.append(claim(tmp_path / "a" / "b", "fp32-s0"))

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(got)) == len(got) == 160
    assert {p.name for p in got} == {"fp32-s0", *(f"fp32-s0.{n}" for n in range(2, 161))}


def test_one_of_four_processes_wins_an_explicit_directory(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from mprun.record.run_directory import claim_exactly\n"
        "print('ready', flush=True); sys.stdin.read(); claim_exactly(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    racers = [subprocess.Popen(command, **pipes, text=True) for _ in range(4)]
    for racer in racers:
        racer.stdout.readline()
    for racer in racers:
        racer.stdin.close()  # all of them are let go within a millisecond
    errors = [racer.stderr.read() for racer in racers]
    codes = [racer.wait(timeout=300) for racer in racers]
    for stream in (stream for racer in racers for stream in (racer.stdout, racer.stderr)):
        stream.close()
    assert codes.count(0) == 1 and sum("already exists" in error for error in errors) == 3


def name(*overrides: str) -> str:
    return compose_config(overrides).place().relative_to("outputs").as_posix()


@pytest.mark.slow
def test_names_hold_what_differs():
    assert name() == "lstm_lm-docs_words/fp32-s0"
    own = name("model=resnet50", "precision=amp", "optim.lr=0.05", "seed=3")
    assert own == "resnet50-digits_32/amp-optim.lr=0.05-s3"
    assert name("name=mine", "device=cpu", "threads=1") == "lstm_lm-docs_words/fp32-mine-s0"
    assert name("numerics=probes", "numerics.every=7", "numerics.modules=[lstm]") == name()
    assert name("precision=amp", "scaler=static") == "lstm_lm-docs_words/amp-scaler=static-s0"


def test_names_tell_patterns_apart():
    key = "precision.matmul.modules"
    values = ["['*']", "['!*']", "['*',output]", "['!output']", "[output]", "['?output']"]
    names = [name("model=gpt", "precision=nvfp4", f"{key}={value}") for value in values]
    assert len(set(names)) == len(values)
    whole = re.compile(r"[A-Za-z0-9._=+/-]+")  # no shell reads more into it
    assert all(whole.fullmatch(one) for one in names)
    assert f"{key}=_all_output-" in names[2] and f"{key}=_not_output-" in names[3]
    assert names[4].endswith(f"{key}=_output_-s0")  # as ever
    blocks = "precision.overrides.blocks.*.attention=fp32"
    assert name("precision=amp", blocks).endswith(f"amp-{blocks.replace('*', '_')}-s0")


def test_names_are_safe_paths_of_bounded_length():
    long = name(*(f"precision.overrides.layer[{n}].*=fp32" for n in range(30)))
    folder, run = long.split("/")
    assert len(run) <= 200 and not set(run) & set("[]*/ ")
    # Cut off, but still told apart.
    assert long != name(*(f"precision.overrides.layer[{n}].*=fp32" for n in range(31)))


def hashed(*overrides: str) -> str:
    return config_hash(compose_config(overrides).as_dict())


SAME = ["name=x", "output_root=elsewhere", "output_dir=there", "optim=sgd_plain", "seed=0"]
SAME += ["train.log_every=3", "train.checkpoint_every=5", "train.keep_checkpoints=7"]
SAME += ["numerics=probes", "numerics.modules=[lstm]"]
OTHER = ["seed=1", "optim.lr=0.5", "precision=amp", "scaler=static", "train.steps=299"]
OTHER += ["train.eval_every=5", "data.batch_size=10", "precision.overrides.lstm=fp32", "threads=1"]


def test_the_hash_sees_what_may_change_a_number_and_nothing_else():
    plain = hashed()
    assert [one for one in SAME if hashed(one) != plain] == []
    assert [one for one in OTHER if hashed(one) == plain] == []


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"status": "running"})
    with pytest.raises(TypeError):
        write_json(path, {"status": object()})
    assert path.read_text().strip() == '{\n "status": "running"\n}'
