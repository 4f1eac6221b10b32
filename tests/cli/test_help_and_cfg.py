"""--help, --cfg, --info and --version: what they print, and that nothing is written."""

import fcntl
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from functools import cache

import pytest
import yaml

from mprun.cli.dispatch import main, verbs
from mprun.cli.help import GROUPS, completions
from mprun.config import option_files
from mprun.config.compose import compose_config
from mprun.config.fields import allowed
from mprun.config.keys import FIELDS, meanings
from mprun.config.option_files import conf_dir

from ..helpers import refused
from ..shipped import ALL_MODES
from ..tables import with_extensions

# Of verbs with an option that says another page.
HELP_PAGES = with_extensions("HELP_PAGES", [])


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


def test_the_first_page_fits_a_screen_and_names_the_others(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 60
    for name in (*GROUPS, "compare", "dist"):
        assert f"\n  {name} " in text
    for verb in verbs():
        assert f"mprun {verb}" in text
    for words in re.findall(r"^  mprun (.*--help.*?)  ", text, re.MULTILINE):
        assert main(words.split()) == 0 and capsys.readouterr().out
    assert len(re.findall("--help", text)) >= 4


def test_every_option_is_described_by_whole_sentences():
    for group in GROUPS:
        for option, path in option_files.option_files(group).items():
            said = option_files.what_it_is(path)
            assert re.fullmatch(r"[A-Za-z\d].*[.)]", said), (group, option, said)
            assert said.count("(") == said.count(")"), (group, option, said)


def test_help_lists_verbs_groups_options_and_keys(capsys):
    assert main(["--help", "all"]) == 0
    text = capsys.readouterr().out
    for verb in verbs():
        assert f"mprun {verb}" in text
    for group in ("model", "data", "optim", "precision", "scaler", "train", "numerics"):
        own = text.partition(f"\n  {group}\n")[2]
        for option in option_files.option_files(group):
            assert f"    {option} " in own, (group, option)  # and what it is
    for key in ("optim.lr", "train.clip_norm", "scaler.growth_interval", "compare.margin"):
        assert key in text
    assert "schema" not in text


def page(capsys, *words) -> str:
    """Return the output of a command without line breaks and columns."""
    assert main([*words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_of_a_key(capsys):
    text = page(capsys, "--help", "scaler.growth_interval")
    assert text.startswith("scaler.growth_interval Number of steps without overflow")
    assert "type whole number or null" in text and "allowed >= 1 and < 2^31" in text
    assert "2000 in apex, dynamic," in text and "of scaler dynamic" in text
    assert "in the configuration hash; runs that are compared must agree in it" in text


def test_help_of_a_key_that_data_sources_differ_in(capsys):
    text = page(capsys, "--help", "data.image_size")
    assert "of data digits, synthetic_images, cifar10" in text
    assert "default 224" in text and "for models that use it" in text


@pytest.mark.slow
def test_help_of_every_key_group_and_verb(capsys, monkeypatch):
    """With a range where there is one, in 80 columns."""
    # Each page reads the same option files: for all pages once.
    monkeypatch.setattr(option_files, "_text_of", cache(option_files._text_of))
    for key, fields in FIELDS.items():
        assert main(["--help", key]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80, key
        words = " ".join(text.split())
        assert fields[0].metadata["doc"].lower() in words.lower(), key
        for bounds in (field.metadata.get("bounds") for field in fields):
            assert not bounds or f"allowed {allowed(bounds)}" in words, key
    for word in (*GROUPS, "compare"):
        assert main(["--help", word]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80, word
        for key in (key for key in FIELDS if key.startswith(f"{word}.")):
            owned = word in ("model", "data") and any(one.variants for one in meanings(key))
            assert f"  {key} " in text or owned or key.endswith((".name", ".kind")), key
        assert word not in ("model", "data") or len(text.splitlines()) < 45
    assert "usage: mprun doctor" in page(capsys, "--help", "doctor")


@pytest.mark.slow
def test_help_of_an_option_has_its_keys_alone_with_its_values(capsys):
    text = page(capsys, "--help", "model=gpt")
    assert text.startswith("model=gpt: GPT-2 as in nanoGPT")
    assert "model.hidden_size=128 Number of units of the residual stream" in text
    assert "model.bias=false" in text and "dropout" not in text and "projection_size" not in text
    assert "model.hidden_size=768" in page(capsys, "model=gpt2", "--help")
    assert "optim.momentum=" in page(capsys, "--help", "optim=sgd")
    assert "betas" not in page(capsys, "--help", "optim=sgd")
    assert "data.root=null" in page(capsys, "--help", "data=imagenet")
    refused(capsys, "--help", "model=gptt", says="did you mean 'gpt'?")


@pytest.mark.slow
def test_help_of_every_option_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setattr(option_files, "_text_of", cache(option_files._text_of))
    for word in (f"{group}={one}" for group in GROUPS for one in option_files.option_files(group)):
        assert main(["--help", word]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"{word}: ") and max(map(len, lines)) <= 80, word


def test_help_of_an_entry_of_a_mapping(capsys):
    assert "Dtype of modules by name pattern" in page(capsys, "precision.overrides.fc", "--help")


@pytest.mark.parametrize(
    ("word", "nearest"),
    [("growth_interval", "scaler.growth_interval"), ("doctro", "doctor")]
    + [(word, "optim.lr") for word in ("optm.lr", "learning_rate", "optim.lr.x")],
)
def test_help_of_an_unknown_key_names_the_nearest(word, nearest, capsys):
    told = f"--help {word}: no key, group or verb has this name; did you mean '{nearest}'?"
    refused(capsys, "--help", word, says=told)


@pytest.mark.parametrize("columns", [None, 50])
def test_every_help_page_fits_the_terminal(columns, monkeypatch, capsys):
    """argparse's own usage line is the one thing that no narrow width breaks."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    for words in [[], ["all"], *([verb] for verb in verbs()), *map(str.split, HELP_PAGES)]:
        assert main([*words, "--help"]) == 0
        text = capsys.readouterr().out
        if columns:
            text = text.partition("options:")[2] if words not in ([], ["all"]) else ""
        long = [line for line in text.splitlines() if len(line) > (columns or 80)]
        assert not long and (text or words in ([], ["all"])), (words, long)


OPTIONS = ["-m", "--multirun", "--config-dir"]
COMPLETIONS = [
    ("mprun comp", ["compare"]),
    ("mprun compare ", []),  # files
    ("mprun compare --s", ["--scalar", "--step"]),
    ("mprun --con", ["--config-dir"]),
    ("mprun --config-dir ", []),
    ("mprun opt", ["optim=", "optim."]),
    ("mprun mod", ["model=", "model."]),
    ("mprun precision=", [f"precision={mode}" for mode in sorted(ALL_MODES)]),
    ("mprun optim.mo", ["optim.momentum="]),
    ("mprun model=res", ["model=resnet50", "model=resnet50_preact"]),
    ("mprun -m precision=fp32,am", ["precision=fp32,amp", "precision=fp32,amp_bf16"]),
    ("mprun device=", ["device=auto", "device=cuda", "device=cpu"]),
    ("mprun deterministic=t", ["deterministic=true"]),
    ("mprun model=dcgan model.h", []),
    ("mprun model=lstm_lm model.h", ["model.hidden_size="]),
    ("mprun resume=", []),
]
COMPLETIONS = with_extensions("COMPLETIONS", COMPLETIONS)


@pytest.mark.parametrize(("line", "wanted"), COMPLETIONS)
def test_completion(line, wanted):
    assert completions(line, verbs(), OPTIONS) == wanted


def test_completion_of_an_option_of_ones_own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "precision").mkdir()
    (folder / "precision" / "mymode.yaml").write_text("")
    found = completions(f"mprun --config-dir {folder} precision=my", {}, OPTIONS)
    assert found == ["precision=mymode"]


# How each is started, and what makes it read the script that completes.
SHELLS = {
    "bash": (["--norc", "--noprofile", "-i"], 'eval "$(mprun -sc install=bash)"'),
    "zsh": (["-f", "-i"], 'eval "$(mprun -sc install=zsh)"'),
    "fish": (["--no-config", "-i"], "mprun -sc install=fish | source"),
}
TYPED = {
    "mprun comp": "compare",
    "mprun -m precision=fp32,fp16_n": "-m precision=fp32,fp16_naive",
    "mprun compare outd": "compare outdir",
    "mprun resume=outd": "resume=outdir",
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.few(1)
def test_a_shell_completes(shell, tmp_path_factory):
    """As typed into a terminal, TAB and Enter behind each line; what the command was then given."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    folder = tmp_path_factory.mktemp("typed")
    (folder / "outdir").mkdir()
    program = folder / "mprun"
    asked = f'[ "$1" = -sc ] && exec {sys.executable} -m mprun "$@"'
    program.write_text(f'#!/bin/sh\n{asked}\necho "given:$*:"\n')
    program.chmod(0o755)
    options, read = SHELLS[shell]
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHONPATH": str(conf_dir().parent), "HOME": str(folder)}
    environment |= {"TERM": "xterm", "LANG": "C.UTF-8"}
    ours, theirs = pty.openpty()
    how = dict.fromkeys(("stdin", "stdout", "stderr"), theirs) | {"start_new_session": True}
    how["preexec_fn"] = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    process = subprocess.Popen([shell, *options], cwd=folder, env=environment, **how)
    os.close(theirs)
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while text not in seen and time.monotonic() < end:
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 65536).decode(errors="replace")
        assert text in seen, seen

    try:
        os.write(ours, f"{read}; echo re''ady\n".encode())
        until("ready")
        for line, wanted in TYPED.items():
            seen = ""
            os.write(ours, f"{line}\t\n".encode())
            until("given:")
            until(f"given:{wanted}")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    ["", "model=dcgan precision=amp", "optim.lr=0.5 scaler=static precision=amp"]
    + ["precision.overrides.lstm*=fp32", "model=conv_autoencoder data.image_size=32"],
)
def test_cfg_job_is_the_resolved_configuration(line, capsys):
    assert main(["--cfg", "job", *line.split()]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == compose_config(line.split()).as_dict()


def test_cfg_of_one_part(capsys):
    assert main(["--cfg", "job", "-p", "scaler", "precision=amp", "--resolve"]) == 0
    scaler = yaml.safe_load(capsys.readouterr().out)
    assert (scaler["kind"], scaler["growth_interval"]) == ("dynamic", 2000)


def test_cfg_knows_the_options_of_the_user(capsys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "train").mkdir()
    (folder / "train" / "mine.yaml").write_text("steps: 3\n")
    assert main(["--config-dir", str(folder), "--cfg", "job", "train=mine"]) == 0
    # The model's own choice of length (lm) gave way to the option on the command line.
    assert yaml.safe_load(capsys.readouterr().out)["train"]["steps"] == 3


def test_info_defaults_names_the_files(capsys):
    text = page(capsys, "--info", "defaults", "model=dcgan")
    assert "data/digits_gan" in text and "optim/adam_gan" in text


def test_version(capsys):
    from mprun import __version__

    assert page(capsys, "--version") == f"mprun {__version__}"
