"""Progress: plain lines off a terminal, a bar on one."""

import io

from mprun.record.console import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show_all(stream, seconds=0.0):
    progress = Progress(8, "token", stream, seconds)
    for step in (2, 4, 6, 8):
        progress.show(
            step,
            {
                "loss": 1 / step,
                "loss_scale": 2.0**step,
                "skipped": step // 4,
                "samples_per_s": 1234.6,
            },
        )
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


def test_a_terminal_gets_one_bar_that_is_drawn_over():
    text = show_all(Terminal())
    bars = [part for part in text.replace("\n", "\r").split("\r") if part.startswith("[")]
    assert [bar[1:21].count("#") for bar in bars] == [5, 10, 15, 20]
    assert text.endswith("\n")
    # The note does not stay behind the rest of a longer bar.
    assert "\neval" not in text and "\reval at step 4: loss 0.5\n" in text
