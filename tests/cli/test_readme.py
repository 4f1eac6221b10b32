"""Every `mprun` command in README.md and docs/usage.md composes."""

import re
import shlex
from pathlib import Path

import pytest

from mprun.cli.dispatch import VERBS
from mprun.config.compose import compose_config, group_options, hydra_session
from mprun.config.overrides import parse_overrides, sweep_values

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "usage.md")
# What a reader replaces: such a command is not run as it stands.
PLACEHOLDER = re.compile(r"[<>]|\.\.\.|…|\b[A-Z]{2,}\b|/data/|outputs/")


def commands() -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    blocks = re.findall(r"^```(?:console|bash|sh|shell)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = []
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+#.*", "", line.strip().removeprefix("$ "))
            if re.match(r"(\S*/)?mprun(\s|$)", line):
                lines.append(line)
    return lines


@pytest.mark.parametrize("command", dict.fromkeys(commands()))
def test_command_composes(command):
    words = shlex.split(command)[1:]
    if words and not words[0].startswith("-") and "=" not in words[0]:
        assert words[0] in VERBS, f"{words[0]} is no verb"
        return
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    overrides = [word for word in overrides if not PLACEHOLDER.search(word)]
    single = []
    with hydra_session(None):
        for override in parse_overrides(overrides):
            if override.is_sweep_override():
                assert "-m" in words or "--multirun" in words, f"{override.input_line} without -m"
                single.append(sweep_values(override, group_options(override.key_or_group))[0])
            else:
                single.append(override.input_line)
    # A folder of data is a placeholder.
    compose_config(single, files=False)


def test_the_readme_is_short():
    assert len(PAGES[0].read_bytes()) <= 8000
