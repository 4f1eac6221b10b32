"""docs/own_data.md: blocks are the examples, commands run, and what it shows of them holds."""

import math
import re
from subprocess import CompletedProcess

import pytest

from ..pages import ROOT, blocks, replay

PAGE = (ROOT / "docs" / "own_data.md").read_text(encoding="utf-8")
EXAMPLES = ("own_images.py", "own_text.py")
REFUSED = ("data.options.shft=2", "mprun resume=outputs/digits_net/fp32-s0 train.steps=180")


def shown() -> dict[str, str]:
    """Command -> what the page shows of its output."""
    found, command = {}, None
    for line in (line for block in blocks(PAGE, "console") for line in block.splitlines()):
        if line.startswith("$ "):
            command = line[2:]
            found[command] = ""
        else:
            found[command] += line + "\n"
    return found


@pytest.fixture(scope="module")
def replayed(tmp_path_factory) -> dict[str, CompletedProcess]:
    """The page's commands, run in a folder that holds its blocks as files."""
    folder = tmp_path_factory.mktemp("page")
    for name, block in zip(EXAMPLES, blocks(PAGE, "python"), strict=True):
        (folder / name).write_text(block)
    (folder / "mine" / "experiment").mkdir(parents=True)
    (folder / "mine" / "experiment" / "digits_net.yaml").write_text(*blocks(PAGE, "yaml"))
    return replay(shown(), folder)


def test_the_blocks_are_the_examples_and_short():
    python = blocks(PAGE, "python")
    assert len(python) == len(EXAMPLES)
    for name, block in zip(EXAMPLES, python, strict=True):
        assert block == (ROOT / "docs" / "examples" / name).read_text(encoding="utf-8")
        # Of data and network together, without the line that says what the file is.
        lines = [line for line in block.splitlines()[1:] if line.strip()]
        assert len(lines) < 30, name


def test_it_says_what_a_refusal_says():
    texts = [text for command, text in shown().items() if command.endswith(REFUSED)]
    assert len(texts) == 2 and all(text.count("\n") == 1 for text in texts)


def without_measured(line: str) -> str:
    """A line by its words: how wide columns are depends on speeds, which a machine has of its own.

    Of a row of verdicts also means, intervals and ratios are measured: its words, seeds, counts and
    scales are not.
    """
    if re.search(r"\dx( |$)", line):
        line = re.sub(r"[-+]?\d+\.\d+", "#", line)
    return " ".join(line.split())


@pytest.mark.slow
def test_every_command_ends_and_prints_as_the_page_says(replayed):
    """Every line of the page is a line of the output, but for the numbers that were measured.

    Losses to 2 % where steps are few: another version of torch may round otherwise. Later ones
    differ from processor to processor; they are below half of what guessing one of ten classes has.
    """
    compared = []
    for command, text in shown().items():
        ended = replayed[command]
        assert ended.returncode == (2 if command.endswith(REFUSED) else 0), (command, ended.stderr)
        printed = [without_measured(line) for line in (ended.stdout + ended.stderr).splitlines()]
        for line in text.splitlines():
            measured = re.search(r"\d/s|/s |data-bound|\|| MiB|eval at|^\.\.\.$", line)
            if line.strip() and not measured:
                assert without_measured(line) in printed, (command, line)
                compared.append(line)
        for step, value in re.findall(r"eval at step (\d+): loss (\S+)", text):
            own = float(re.search(rf"eval at step {step}: loss (\S+)", ended.stderr)[1])
            if int(step) > 100:
                assert max(own, float(value)) < math.log(10) / 2, command
            else:
                assert own == pytest.approx(float(value), rel=0.02), command
    assert compared
