"""Command lines of every verb, over a folder of odd files: 600 random ones.

The folder holds runs of two modes, runs with odd names, records of a stranger, option files with
errors, and what is no file. A case holds if the command ends by itself, or is refused in one line
with exit code 2, 4 or 5, within seconds, and with every file as it was.
"""

import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.command_lines import KEYS, VALUES
from benchmarks.faults.harness import Answer, Campaign, Child, last_line, limit, mprun
from benchmarks.faults.subjects import TINY

GENERATED = 600
AT_ONCE_S = 10.0  # for a refusal, beside other work; alone it takes one
NAMES = ["with space", "ünï 模型 🙂", "-dash", "a=b", "a,b", "new\nline", "*", "[x]{y}", "${x}"]
NAMES += ['it\'s "q"', "#x", "%s", "a:b", "a\\b", "\x1b[31mred", os.fsdecode(b"\xff")]
# Whole contents of run.json, config.yaml and metrics.jsonl.
CONTENTS = {"empty": "", "list": "[]", "null": "null", "number": "7", "text": '"x"', "map": "{}"}
CONTENTS |= {"deep": "[" * 100_000, "NUL": "\0" * 100, "digits": '{"a": 1' + "0" * 5000 + "}"}
CONTENTS |= {"alias": "a: *x", "tag": "a: !!python/object/apply:os.system [touch MADE]\n"}
IN_RECORDS = [None, 1, -1, 1e308, "x", "\x1b[2J", [], {}, True, "x" * 100_000, 10**400]
OPTION_FILES = {
    "unknown key": "foo: 1\n",
    "syntax": "foo: [1\n",
    "tab": "foo:\n\t- 1\n",
    "alias": "foo: *x\n",
    "tag": "foo: !!python/object:x {}\n",
    "target": "_target_: os.system\n",
    "two documents": "---\n---\n",
    "twice": "foo: 1\nfoo: 2\n",
    "a list": "- 1\n",
    "a number": "7\n",
    "nothing": "",
    "NUL": "a: \0\n",
    "keys": "1: 2\ntrue: 3\nnull: 4\n",
    "defaults missing": "defaults: [nothere]\n",
    "defaults of itself": "defaults: [mine]\n",
    "defaults a number": "defaults: 7\n",
    "package": "# @package _global_\nseed: x\n",
    "environment": "name: ${oc.env:HOME}\n",
    "interpolation": "name: ${\n",
    "missing": "name: ???\n",
}
GROUPS = ["model", "data", "optim", "precision", "scaler", "train", "numerics", "experiment"]
WORDS = ["", " ", "0", "-1", "2", "nan", "inf", "-inf", "1e999", "1e-320", "99999999999999999999"]
WORDS += ["0x10", "1_000", "x", "é", "½", "٣", "1,2", ",", "a,b", "[1]", "{a:1}", "${x}", "'"]
WORDS += ['"', "\\", "\n", "\0", "\x1b[31m", "x" * 5000, "True", "null", "fp32", "fp32,nothere"]
WORDS += [
    "--json",
    "-h",
    "*",
    "🙂",
    os.fsdecode(b"\xff"),
    "=",
    "a=b",
    "loss",
    "top1",
    "seed",
    "10%",
]
WORDS += ["dynamic", "static,apex", "table1", "table2,fig9", "small", "full", "4:1"]
FLAGS = """--absolute --tensorboard --check --no-report --higher-is-better --lower-is-better
--paired --json --markdown --no-cures --end-to-end --plain""".split()
# Options with a value, and those of FLAGS; a line has some of them.
OPTIONS = {
    "compare": """--baseline --allow --metric --margin --looks --tag --step --out --absolute
    --tensorboard --check --no-report --higher-is-better --lower-is-better --paired --json
    --markdown""",
    "explain": "--json --no-cures --config-dir",
    "advise": "--steps --every --share --json --config-dir",  # --check trains
    "mismatch": "--tokens --window --batch --pad --band --log-softmax --json --config-dir",
    "paper": """--only --scale --data-root -j --out --config-dir --baseline --allow --metric
    --margin --looks --absolute --json --markdown --no-report""",
    "bench": """--modes --budget --out --windows --steps-per-window --end-to-end --plain
    --json --config-dir""",
    "doctor": "--json --config-dir",
}
ON_DISK = """model=lstm_lm data=text|model=lstm_lm data=lm1b|model=gpt data=token_files
model=resnet50 data=image_folder|model=resnet50 data=cifar10|model=resnet50 data=imagenet
model=ssd300 data=voc|model=deep_speech2 data=speech_manifest
model=seq2seq data=parallel_text|experiment=dcgan_celeba""".replace("\n", "|").split("|")


def generated(campaign: Campaign) -> None:
    """Run random lines of every verb, of sweeps, resumes, help, completion and option files."""
    home = campaign.scratch("verbs")
    _odd_files(home)
    lines = _Lines(home)
    before = _files(home)
    for number in range(GENERATED):
        if number % 100 == 0:
            print(f"verbs: {number} of {GENERATED}", flush=True)
        line = lines.draw()
        output = campaign.folder / "output"
        child = Child(line, home, limit(resource.RLIMIT_AS, 8 * 2**30), output)
        answer = child.wait(120)
        try:  # processes of a sweep that had to be killed
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        after = _files(home)
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        kind = _kind(answer, changed)
        campaign.note("command lines of every verb", repr(line)[-300:], kind, last_line(answer))
        for name in changed:
            path = home / name
            if name not in before and (path.exists() or path.is_symlink()):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        before = _files(home)


def _kind(answer: Answer, changed: list[str]) -> str:
    told = [line for line in answer.output.splitlines() if line.startswith("mprun: ")]
    if answer.code is None:
        return "no answer"
    if "Traceback (most recent call last)" in answer.output or answer.code in (1, 70):
        return "traceback"
    if answer.code in (0, 3):
        return "harmless"
    if answer.code not in (2, 4, 5):
        return f"exit code {answer.code}"
    if changed:
        return f"wrote {changed[0]}"
    if not told:
        return "no line"
    if len(answer.output.splitlines()) > 2:  # a note may come first
        return "more than a line"
    return "found" if answer.seconds < AT_ONCE_S else "late"


def _files(home: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of all below a folder, by name."""
    found = ((str(path.relative_to(home)), path.lstat()) for path in home.rglob("*"))
    return {name: (status.st_size, status.st_mtime_ns) for name, status in found}


def _odd_files(home: Path) -> None:
    (home / "runs").mkdir()
    for mode in ("fp32", "amp"):
        for seed in (0, 1, 2):
            given = [*TINY, f"precision={mode}", f"seed={seed}", "train.steps=4", "numerics=on"]
            run = [*given, "numerics.every=2", f"output_dir={home / 'runs' / mode}-{seed}"]
            if (answer := mprun(run, home)).code != 0:
                raise RuntimeError(f"a run did not train: {answer.output}")
    (home / ".output").unlink()
    source = home / "runs/amp-0"
    for name in NAMES:
        shutil.copytree(source, home / name)
    strange = home / "strange"

    def written(name: str, file: str, write: Callable[[Path], object]) -> None:
        run = shutil.copytree(source, strange / name)
        (run / file).unlink()
        write(run / file)

    for file in ("run.json", "config.yaml", "metrics.jsonl"):
        whole = (source / file).read_text()
        written(f"{file} gone", file, lambda path: None)
        written(f"{file} a folder", file, Path.mkdir)
        written(f"{file} a pipe", file, os.mkfifo)
        more = {"half": whole[: len(whole) // 2], "twice": whole * 2, "BOM": "\ufeff" + whole}
        for name, content in (CONTENTS | more).items():
            written(f"{file} {name}", file, lambda path, text=content: path.write_text(text))
    chance = random.Random(3)
    record = json.loads((source / "run.json").read_text())
    rows = [json.loads(line) for line in (source / "metrics.jsonl").read_text().splitlines()]
    for key in record:
        text = json.dumps({**record, key: chance.choice(IN_RECORDS)})
        written(f"record {key}", "run.json", lambda path, text=text: path.write_text(text))
    for key in rows[-1]:
        value = chance.choice(IN_RECORDS)
        text = "".join(f"{json.dumps({**row, key: value})}\n" for row in rows)
        written(f"row {key}", "metrics.jsonl", lambda path, text=text: path.write_text(text))
    for group in GROUPS:
        for name, content in OPTION_FILES.items():
            folder = home / "conf" / name / group
            folder.mkdir(parents=True)
            (folder / "mine.yaml").write_text(content)
    (home / "one.txt").write_text("hello\n")
    (home / "empty.txt").touch()
    (home / "empty").mkdir()
    (home / "bytes").write_bytes(random.Random(4).randbytes(5000))
    (home / "loop").symlink_to("loop")
    (home / "dangling").symlink_to("nowhere")
    (home / "self").symlink_to(".")
    os.mkfifo(home / "pipe")
    (home / "log.csv").write_text("step,loss\n1,2.0\n2,1.0\n3,0.5\n")
    (home / "bad.csv").write_text("step,loss\n1,x\n")


class _Lines:
    def __init__(self, home: Path) -> None:
        self.chance = random.Random(31)
        top = [path.name for path in home.iterdir()]
        strange = [f"strange/{path.name}" for path in (home / "strange").iterdir()]
        self.paths = [*top, *strange, "nothere", "", " ", "/", ".", "..", "/dev/null", "/dev/zero"]
        self.paths += [
            "/proc/self/mem",
            "a" * 300,
            "a/" * 2000,
            "~",
            "a\0b",
            "http://x/y",
            "-",
            "--",
        ]
        self.paths += ["runs/fp32-0", "runs/amp-0/run.json", "runs/amp-0/checkpoints", "one.txt/x"]
        self.conf = [f"conf/{name}" for name in OPTION_FILES] * 2 + [
            "nothere",
            "one.txt",
            "",
            "pipe",
        ]

    def draw(self) -> list[str]:
        """Return a random line, which trains nothing."""
        pick, chance = self.chance.choice, self.chance.random
        verb = pick([*OPTIONS, *OPTIONS, "sweep", "resume", "resume", "help", "shown", "options"])
        if chance() < 0.15:
            verb = "data"
        if verb in OPTIONS:
            line = self._of_verb(verb)
        elif verb == "sweep":
            more = pick([[], ["-j", pick(WORDS)], ["--stall-after", pick(WORDS)]])
            line = ["-m", *TINY, self._override(), self._override(), "data.root=nothere", *more]
        elif verb == "resume":
            line = [f"resume={pick(self.paths)}", *([self._override()] if chance() < 0.4 else [])]
        elif verb == "help":
            config = ["--config-dir", pick(self.conf)] if chance() < 0.5 else []
            line = ["--help", pick([*KEYS, *WORDS, *OPTIONS]), *config]
        elif verb == "shown":
            flag = pick(["--info", "--cfg", "-sc", "-p"])
            own = ["job", "all", "defaults", "searchpath", "install=bash", "query=fish", *WORDS]
            line = [flag, pick(own), *([self._override()] if chance() < 0.5 else [])]
        elif verb == "options":
            line = ["--config-dir", pick(self.conf), f"{pick(GROUPS)}=mine", "data.root=nothere"]
            line += pick([[], ["--cfg", "job"], ["-m", "seed=0,1"]])
        else:
            key = pick(["data.cache", "data.vocabulary", "output_root", "data.layout", "name"])
            more = [f"{key}={pick(self.paths)}"] if chance() < 0.5 else []
            line = [*pick(ON_DISK).split(), f"data.root={pick(self.paths)}", "device=cpu", *more]
        return [*line, pick(WORDS)] if chance() < 0.05 else line

    def _of_verb(self, verb: str) -> list[str]:
        pick, chance = self.chance.choice, self.chance.random
        line = [verb, *self._options(OPTIONS[verb].split())]
        if verb == "compare" and chance() < 0.3:  # logs of other tools
            ends = ["", "#x", "#*", ",nothere", ":0"]
            line += [f"{pick(['fp32', 'amp', ''])}={pick(self.paths)}{pick(ends)}" for _ in "ab"]
            line += ["--tag", pick(["loss", "x", ""])]
        elif verb in ("compare", "explain", "paper"):
            line += [pick(self.paths) for _ in range(pick([1, 1, 1, 2]))]
        elif verb in ("mismatch", "advise") and chance() < 0.6:
            line += [pick(["fp32", "amp", "nope"]) for _ in range(2 * (verb == "mismatch"))]
            line += [pick(self.paths)]
        elif verb == "doctor":
            line += [self._override()] if chance() < 0.3 else []
        else:
            line += [self._override(), "data.root=nothere"]
        return line

    def _override(self) -> str:
        pick = self.chance.choice
        return f"{pick(KEYS)}={pick([*VALUES, *WORDS, *self.paths[:40]])}"

    def _options(self, known: list[str]) -> list[str]:
        pick, chance = self.chance.choice, self.chance.random
        found: list[str] = []
        for option in self.chance.sample(known, pick([0, 1, 1, 2])):
            values = self.conf if option == "--config-dir" else [*WORDS, *self.paths[:30]]
            if option in FLAGS:
                found.append(option + "=x" * (chance() < 0.1))
            elif chance() < 0.3:
                found.append(f"{option}={pick(values)}")
            else:
                found += [option, pick(values)] if chance() < 0.93 else [option]
        return found
