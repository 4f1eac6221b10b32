"""scripts/docs_pictures: the terminal; without a browser, and with it what TensorBoard shows."""

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from mprun.comparison.tensorboard_summary import write_summaries
from mprun.entry_points import announced
from mprun.record.console import UNSMOOTHED
from tests.compare.made_comparison import comparison, group

SCRIPTS = Path(__file__).parents[2] / "scripts"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(SCRIPTS)
    import docs_pictures as script


def test_without_a_browser_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert script.main([]) == 0
    assert capsys.readouterr().err == "docs_pictures: skipped, needs chromium\n"


def test_the_pictures_are_few_small_and_no_empty_page():
    paths = list(script.PICTURES.glob("*.png"))
    assert 4 <= len(paths) <= 6
    for path in paths:
        assert path.stat().st_size < 150_000
        with Image.open(path) as image:
            assert np.asarray(image.convert("L")).std() > 10


def test_of_a_line_drawn_again_the_last_is_kept():
    drawn = "run x\r\n\x1b[?25lone 1/2\x1b[?25h\r\x1b[2Kone \x1b[32m2/2\x1b[0m\r\nend\r\n"
    assert script.last_screen(drawn) == "run x\none \x1b[32m2/2\x1b[0m\nend"


def test_a_terminal_is_drawn_the_same_each_time(tmp_path):
    command = f'{sys.executable} -c \'import sys; print(sys.stdout.isatty(), 80 * "x" + "y")\''
    text = script.last_screen(script.shown(command, tmp_path, dict(os.environ)))
    assert text == f"True {80 * 'x'}y"
    first, second = tmp_path / "a" / "same.svg", tmp_path / "b" / "same.svg"
    for path in (first, second):
        path.parent.mkdir()
        script.draw("true", text, path)
    assert first.read_bytes() == second.read_bytes()
    # The command, and the line in the width of the terminal.
    rows = texts(first)
    assert rows[:2] == ["$ true", f"True {75 * 'x'}"] and rows[2] == "xxxxxy"


def texts(path: Path) -> list[str]:
    """The lines that an SVG shows."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for one in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text"):
        place = (float(one.attrib["x"]), one.text or "")
        rows.setdefault(float(one.attrib["y"]), []).append(place)
    lines = ["".join(text for _, text in sorted(rows[y])) for y in sorted(rows)]
    return [line.replace("\xa0", " ").rstrip() for line in lines]


def test_the_terminals_show_their_commands_and_fetch_nothing():
    for name, command in script.TERMINALS.items():
        path = script.PICTURES / f"{name}.svg"
        drawn = path.read_text(encoding="utf-8")
        assert len(drawn) < 100_000 and "@font-face" not in drawn and "url(http" not in drawn
        shown = [row for row in texts(path) if row.startswith("$ ")]
        assert shown == [f"$ {command}"]


SETTINGS = """
const box = [...document.querySelectorAll('mat-checkbox')]
  .find((one) => one.textContent.includes('Ignore outliers')).querySelector('input');
return [box.checked, document.querySelector('input[type=number]').value]
"""


@pytest.mark.slow
def test_tensorboard_opens_with_every_point_and_no_smoothing(tmp_path, monkeypatch):
    browser = script.found_browser()
    if browser is None:
        pytest.skip("needs chromium")
    if "mprun" not in entry_points(group="tensorboard_plugins").names:
        # As an installed mprun announces it.
        announcing = tmp_path / "mprun_plugin-0.dist-info"
        announcing.mkdir()
        about = "Metadata-Version: 2.1\nName: mprun_plugin\nVersion: 0\n"
        (announcing / "METADATA").write_text(about)
        own = f"[tensorboard_plugins]\nmprun = {announced('tensorboard_plugins')['mprun']}\n"
        (announcing / "entry_points.txt").write_text(own)
        monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    folder = write_summaries(comparison(group(3, 400)), tmp_path / "logs")
    seen = []
    with (
        script.browsing(browser, tmp_path / "profile") as page,
        script.tensorboard(folder) as address,
    ):
        for behind in (UNSMOOTHED, "data/plugin/mprun/table"):
            page.open(address + behind, 1280)
            page.wait("document.querySelectorAll('scalar-card line-chart').length > 1")
            seen.append(page.run(SETTINGS))
    assert seen == [[True, "0"], [False, "0"]]
