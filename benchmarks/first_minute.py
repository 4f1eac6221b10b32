"""What a newcomer sees, and when: command lines in a pseudo-terminal, of two checkouts in turn.

    python -m benchmarks.first_minute BEFORE AFTER OUT.json [--rounds N]

BEFORE and AFTER are folders with mprun. Each command runs in a terminal of 80 or 120 columns, in a
folder of its checkout's own; OUT.json has what came out, each piece with its second.
"""

import argparse
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import NamedTuple

_LIMIT_S = 400.0
_LSTM = "model=lstm_lm train.steps=40 train.checkpoint_every=10"
_PROBED = "model=lstm_lm precision=amp train.steps=24 numerics=on numerics.every=6"
_RESNET = "model=resnet50 precision=amp train.steps=11"


class Trial(NamedTuple):
    """A command; SIGINT stops it once a file like `until` is there, or after `seconds`."""

    name: str
    words: str
    columns: int = 80
    until: str = ""
    seconds: float = _LIMIT_S
    terminal: bool = True
    timed: bool = False  # repeated in each round


TRIALS = (
    Trial("run, 80 columns", f"{_RESNET} output_dir=outputs/a", timed=True),
    Trial("data.root is a file", "model=resnet50 data=image_folder data.root=one.txt"),
    Trial("bad key", "--config-dir own experiment=key"),
    Trial("bad option", "--config-dir own experiment=option"),
    Trial("bad group", "--config-dir own experiment=group"),
    Trial("no data", "model=resnet50 data=image_folder"),
    Trial(
        "sweep, stopped",
        f"-m {_LSTM} precision=fp32,amp seed=0,1",
        until="outputs/lstm*/amp*-s1/checkpoints/step-*10",
    ),
    Trial("compare, a cell stopped", "compare outputs/lstm_lm-docs_words --no-report"),
    Trial("ls", "ls outputs"),
    Trial("sweep, again", f"-m {_LSTM} precision=fp32,amp seed=0,1"),
    Trial("probed run, 120 columns", f"{_PROBED} output_dir=outputs/probed", columns=120),
    Trial("advise RUN", "advise outputs/probed"),
    Trial("explain, done", "explain outputs/probed"),
    Trial("advise", "advise model=lstm_lm --steps 12 output_dir=outputs/advised"),
    Trial("show, advised", "show outputs/advised"),
    Trial("cosine", f"{_LSTM} optim.schedule=cosine output_dir=outputs/cosine", timed=True),
    Trial("cosine, longer", "resume=outputs/cosine train.steps=80", timed=True),
    Trial("paper", "paper", seconds=12.0, timed=True),
    Trial("paper --list", "paper --list", timed=True),
    Trial("no terminal", f"{_LSTM} output_dir=outputs/constant", terminal=False),
)
_GLOBAL = "# @package _global_\n"
_FILES = {
    "one.txt": "",
    "own/experiment/key.yaml": f"{_GLOBAL}optim:\n  lrr: 0.1\n",
    "own/experiment/option.yaml": f"{_GLOBAL}defaults:\n  - override /model: lstm_lmm\n",
    "own/experiment/group.yaml": f"{_GLOBAL}defaults:\n  - override /modl: lstm_lm\n",
}


def watch(trial: Trial, tree: Path, folder: Path) -> dict:
    """Run the command; return what it printed, with seconds, and how it ended."""
    words = [sys.executable, "-m", "mprun", *trial.words.split()]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    own, other = pty.openpty() if trial.terminal else os.pipe()
    if trial.terminal:
        size = struct.pack("HHHH", 40, trial.columns, 0, 0)
        fcntl.ioctl(other, termios.TIOCSWINSZ, size)
    started, pieces, stopped = time.monotonic(), [], False
    process = subprocess.Popen(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=other, stderr=other,
        start_new_session=True,
    )  # fmt: skip
    os.close(other)
    while True:
        now = time.monotonic() - started
        if select.select([own], [], [], 0.02)[0]:
            try:
                data = os.read(own, 65536)
            except OSError:  # the terminal has no writer any more
                data = b""
            if not data:
                break
            pieces.append((round(now, 2), data.decode(errors="replace")))
        there = trial.until and any(folder.glob(trial.until))
        if not stopped and (there or now > trial.seconds):
            os.kill(process.pid, signal.SIGINT)
            stopped = True
    os.close(own)
    code = process.wait()
    seconds = round(time.monotonic() - started, 2)
    return {"exit_code": code, "seconds": seconds, "stopped": stopped, "printed": pieces}


def signs(found: dict) -> dict[str, float | None]:
    """Return the seconds to the first piece, from a banner to the next piece, and to a speed."""
    pieces = [(at, _plain(text)) for at, text in found["printed"] if _plain(text).strip()]
    banner = next((i for i, (_, text) in enumerate(pieces) if "  watch " in text), None)
    after = None
    if banner is not None and pieces[banner][1].rstrip().split("\n")[-1].startswith("  watch "):
        after = round(pieces[banner + 1][0] - pieces[banner][0], 2)
    elif banner is not None:
        after = 0.0
    speed = next((at for at, text in pieces if re.search(r"\d (images|tokens)/s", text)), None)
    begun = None if banner is None or speed is None else round(speed - pieces[banner][0], 2)
    first = pieces[0][0] if pieces else None
    return {"first": first, "banner_to_next": after, "banner_to_speed": begun}


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")


def main() -> None:
    """Run every trial of both checkouts and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    trees = {"before": given.before.resolve(), "after": given.after.resolve()}
    found: dict[str, list] = {}
    with tempfile.TemporaryDirectory() as place:
        for number in range(given.rounds):
            folders = {}
            for side in trees:
                folders[side] = Path(place, side, str(number))
                for name, text in _FILES.items():
                    path = folders[side] / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text)
            for trial in TRIALS:
                for side, tree in trees.items() if trial.timed or number == 0 else ():
                    one = watch(trial, tree, folders[side])
                    one |= {"side": side, "round": number, "load": round(os.getloadavg()[0], 1)}
                    one |= {"words": trial.words, "columns": trial.columns, "signs": signs(one)}
                    found.setdefault(trial.name, []).append(one)
                    print(trial.name, side, one["signs"], one["seconds"], flush=True)
                    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
