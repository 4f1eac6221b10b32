"""Progress: plain lines off a terminal, a bar on one."""

import io
import json
import re
import sys

import pytest

from mprun.record.console import Progress, counted, steady_terminal

from ..helpers import TINY_LM, rows_of, run


def test_what_takes_long_is_counted_and_what_does_not_is_not(capsys):
    assert list(counted("abc", "reading runs")) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""
    assert list(counted(range(2000), "reading runs", seconds=0)) == [*range(2000)]
    lines = capsys.readouterr().err.splitlines()
    assert (lines[0], lines[-1]) == ("reading runs: 0 of 2,000", "reading runs: 1,999 of 2,000")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show_all(stream, seconds=0.0):
    progress = Progress(8, "token", stream, seconds)
    for step in (2, 4, 6, 8):
        shown = {"loss": 1 / step, "loss_scale": 2.0**step, "skipped": step // 4}
        progress.show(step, shown | {"samples_per_s": 1234.6})
        if step == 4:
            progress.note("eval at step 4: loss 0.5")
    progress.close()
    return stream.getvalue()


def test_plain_lines_have_step_loss_scale_skips_speed_and_time_left():
    text = show_all(io.StringIO())
    assert "\r" not in text and "\x1b" not in text
    first, second, note, *_ = lines = text.splitlines()
    assert len(lines) == 5
    assert first == "step 2/8  loss 0.5  scale 4  1235 tokens/s"
    assert second.startswith("step 4/8  loss 0.25  scale 16  skipped 1  1235 tokens/s  ETA 00:0")
    assert note == "eval at step 4: loss 0.5"
    assert lines[-1].startswith("step 8/8") and lines[-1].endswith("ETA 00:00")


def test_plain_lines_are_rare_but_the_last_one_comes():
    lines = show_all(io.StringIO(), seconds=1000).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["2/8", "8/8"]


@pytest.fixture
def terminal(monkeypatch):
    """A stream to a terminal of 80 columns."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


@pytest.mark.parametrize("columns", [80, 50])
def test_a_terminal_gets_one_bar_that_is_drawn_over(monkeypatch, terminal, columns):
    monkeypatch.setenv("NO_COLOR", "1")  # what is not filled is left empty
    monkeypatch.setenv("COLUMNS", str(columns))
    text = show_all(terminal)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [part for part in re.split(r"[\r\n]+", shown) if "step " in part and "eval" not in part]
    # Each is drawn over the one before and fits into a line of the terminal.
    assert all(len(line) <= columns for line in lines)
    assert len(set(lines)) == 4 and shown.count("\n") == 2
    if columns == 80:
        for line, step in zip(dict.fromkeys(lines), (2, 4, 6, 8), strict=True):
            width = line.index(" step")  # what the text leaves free
            assert width > 5 and abs(line.count("\u2501") - width * step / 8) <= 1
        assert "ETA 00:00" in lines[-1]
    # The note does not stay behind the rest of a longer bar.
    assert "\neval" not in text and "\r\x1b[2Keval at step 4: loss 0.5\n" in text
    # The cursor is there while the bar is: a killed run leaves it behind.
    assert 0 < text.index("\x1b[?25h") < text.index("step 2/8") and text.endswith("\n\x1b[?25h")


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert show_all(Terminal()) == show_all(io.StringIO())


FULL = {"loss": 6.54321, "loss_scale": 65536.0, "skipped": 12, "samples_per_s": 123456.7}


def drawn(stream) -> list[str]:
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    return [part for part in re.split(r"[\r\n]+", shown) if part.strip()]


def test_a_line_fits_the_terminal_and_loses_what_matters_least(monkeypatch, terminal):
    progress = Progress(1_000_000, "token", terminal)
    for columns in (200, 80, 60, 40):  # the window becomes smaller
        monkeypatch.setenv("COLUMNS", str(columns))
        progress.show(100_000, FULL | {"data_wait": 0.42})
        progress.show(100_001, FULL | {"data_wait": 0.42})
        line = drawn(terminal)[-1]
        assert len(line) < columns and "step 100001/1000000" in line
        kept = [part in line for part in ("loss", "ETA", "skipped", "waiting", "tokens/s", "scale")]
        assert kept == sorted(kept, reverse=True), line
        assert sum(kept) == {200: 6, 80: 3, 60: 2, 40: 0}[columns], line
        progress.note("memory  " + "parameters fp32 7.76 MiB, " * 10)
        assert all(len(part) < columns for part in drawn(terminal)[-3:])
    progress.close()


def test_off_a_terminal_nothing_is_left_out():
    stream = io.StringIO()
    Progress(1_000_000, "token", stream).show(100_000, FULL | {"data_wait": 0.42})
    assert "scale 65536" in stream.getvalue() and "waiting for data 42%" in stream.getvalue()


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the console reads, as a list of one number."""
    now = [100.0]
    monkeypatch.setattr("mprun.record.console.time.monotonic", lambda: now[0])
    return now


def test_an_evaluation_shows_how_far_it_is(terminal, clock):
    def evaluated(stream) -> list[str]:
        progress = Progress(8, "image", stream)
        progress.show(4, FULL)
        progress.evaluation()
        for done in range(10, 101, 10):
            clock[0] += 2
            progress.evaluated(done, 100)
        progress.note("eval at step 4: loss 0.5")
        progress.close()
        return drawn(stream)

    bar = evaluated(terminal)
    assert [line for line in bar if "evaluating 50/100 images" in line and "step 4/8" in line]
    assert "loss 6.5432" in bar[-1]  # what it was before
    lines = evaluated(io.StringIO())  # one every five seconds
    assert lines[1:] == [
        *(f"evaluating {done}/100 images" for done in (30, 60, 90)),
        "eval at step 4: loss 0.5",
    ]


HOSTILE = "amp\x1b]0;owned\x07\x1b[2J\r\b\u202e\x9b1m\udc80"


def test_control_characters_never_reach_a_terminal_and_text_of_any_language_does(monkeypatch):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with steady_terminal():
        for stream in (sys.stdout, sys.stderr):
            print(f"{HOSTILE}|a\tb\nGröße 平均\u3000\u00a0", file=stream)
        assert sys.stdout.isatty()
        sys.stdout.write(json.dumps({"mode": HOSTILE}, indent=1))
    assert sys.stdout is out and sys.stderr is err
    text = "a\tb\nGröße 平均\u3000\u00a0\n"
    shown = r"amp\x1b]0;owned\x07\x1b[2J\r\x08\u202e\x9b1m\udc80|" + text
    assert err.getvalue() == shown and out.getvalue().startswith(shown)
    assert json.loads(out.getvalue().removeprefix(shown)) == {"mode": HOSTILE}


def test_a_bar_is_drawn_through_the_filter_that_its_notes_pass(monkeypatch, terminal):
    monkeypatch.setattr(sys, "stderr", err := terminal)
    with steady_terminal():
        progress = Progress(8, "token")
        progress.show(4, FULL)
        progress.note(f"notes of {HOSTILE}")
        progress.close()
    assert "\x1b[?25h" in err.getvalue() and "\u2501" in err.getvalue()  # the cursor, the bar
    assert r"notes of amp\x1b]0;owned\x07\x1b[2J\r\x08" in err.getvalue()
    assert "\x1b]0;" not in err.getvalue() and "\x1b[2J" not in err.getvalue()


def counted_to(stream, clock, samples, steps=6, seconds=1.0) -> list[str]:
    """The lines of a run whose first step takes ten times as long, and whose third has a record."""
    progress = Progress(20, "image", stream, samples=samples)
    progress.begin(1)
    for step in range(1, steps + 1):
        clock[0] += 10 * seconds if step == 1 else seconds
        progress.count(step)
        if step == 3:
            progress.show(step, {"loss": 0.5, "loss_scale": 1.0, "skipped": 0})
    progress.close()
    return drawn(stream)


def test_a_bar_moves_from_the_first_step_on(terminal, clock):
    lines = counted_to(terminal, clock, samples=8)
    lines = [line.lstrip("\u2501\u2578\u257a ").rstrip() for line in lines]
    # The first step, which counts operations too, tells no speed: 8 images a second after it.
    assert list(dict.fromkeys(filter(None, lines))) == [
        "computing step 1/20",
        "step 1/20",
        "step 2/20  8 images/s  ETA 00:18",
        "step 3/20  8 images/s  ETA 00:17",
        "step 3/20  loss 0.5  ETA 00:17",
        "step 4/20  loss 0.5  ETA 00:16",
        "step 5/20  loss 0.5  ETA 00:15",
        "step 6/20  loss 0.5  ETA 00:14",
    ]


def test_a_count_ahead_of_the_device_tells_no_speed_and_no_time(terminal, clock):
    text = "\n".join(counted_to(terminal, clock, samples=0, steps=2))
    assert "step 2/20" in text and "images/s" not in text and "ETA" not in text


def test_beside_a_count_ahead_of_the_device_stands_the_time_of_its_records(terminal, clock):
    progress = Progress(100, "image", terminal)
    for step, seconds in ((10, 1.0), (20, 10.0)):  # a second a step; the host is ten steps ahead
        clock[0] += seconds
        progress.count(step + 10)
        progress.show(step, {"loss": 0.5, "loss_scale": 1.0, "skipped": 0})
    clock[0] += 0.2
    progress.count(31)
    progress.close()
    assert drawn(terminal)[-1].endswith(" step 31/100  loss 0.5  ETA 01:20")


def test_a_bar_is_drawn_at_most_ten_times_a_second(terminal, clock):
    progress = Progress(10_000, "image", terminal)
    progress.begin(1)
    for step in range(1, 1001):
        clock[0] += 0.001
        progress.count(step)
    progress.close()
    shown = {line for line in drawn(terminal) if re.search(r" step \d+/10000", line)}
    assert 9 <= len(shown) <= 11


def test_off_a_terminal_the_count_is_told_until_there_is_a_loss(clock):
    lines = counted_to(io.StringIO(), clock, samples=8, steps=20, seconds=2.0)
    assert lines == ["computing step 1/20", "step 1/20", "step 3/20  loss 0.5  ETA 00:34"]


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "skips"), [(2.0**24, True), (2.0**4, False)])
def test_a_scale_that_searches_for_its_level_is_said_to_be_normal(tmp_path, capsys, scale, skips):
    words = ["precision=amp", f"scaler.init_scale={scale}", "train.steps=40", "train.log_every=40"]
    assert run(tmp_path / "r", *TINY_LM, *words) == 0
    rows = rows_of(tmp_path / "r", "train")
    skipped, level = rows[-1]["skipped"], rows[-1]["loss_scale"]
    assert bool(skipped) == skips
    said = [line for line in capsys.readouterr().err.splitlines() if line.endswith(": normal")]
    what = f"{skipped} updates skipped while the loss scale finds its level"
    assert said == [f"{what} ({scale:g} to {level:g}): normal"] * skips
