"""scripts/docs_pictures: without a browser, and with it what TensorBoard shows."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mprun.comparison.tensorboard_summary import write_summaries
from mprun.entry_points import announced
from mprun.record.console import UNSMOOTHED
from tests.compare.made_comparison import comparison, group

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import docs_pictures

    return docs_pictures


def test_without_a_browser_one_line_says_so(script, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert script.main([]) == 0
    assert capsys.readouterr().err == "docs_pictures: skipped, needs chromium and chromedriver\n"


def test_the_pictures_are_few_small_and_no_empty_page(script):
    paths = list(script.PICTURES.glob("*.png"))
    assert 4 <= len(paths) <= 6
    for path in paths:
        assert path.stat().st_size < 150_000
        with Image.open(path) as image:
            assert np.asarray(image.convert("L")).std() > 10


SETTINGS = """
const box = [...document.querySelectorAll('mat-checkbox')]
  .find((one) => one.textContent.includes('Ignore outliers')).querySelector('input');
return [box.checked, document.querySelector('input[type=number]').value]
"""


@pytest.mark.slow
def test_tensorboard_opens_with_every_point_and_no_smoothing(script, tmp_path, monkeypatch):
    browser, driver = script.tools()
    if browser is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    # As an installed mprun announces it.
    announcing = tmp_path / "mprun_plugin-0.dist-info"
    announcing.mkdir()
    (announcing / "METADATA").write_text("Metadata-Version: 2.1\nName: mprun_plugin\nVersion: 0\n")
    own = f"[tensorboard_plugins]\nmprun = {announced('tensorboard_plugins')['mprun']}\n"
    (announcing / "entry_points.txt").write_text(own)
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    folder = write_summaries(comparison(group(3, 400)), tmp_path / "logs")
    seen = []
    with (
        script.browsing(driver, browser, tmp_path / "profile") as page,
        script.tensorboard(folder) as address,
    ):
        for behind in (UNSMOOTHED, "data/plugin/mprun/table"):
            page.open(address + behind, 1280)
            page.wait("document.querySelectorAll('scalar-card line-chart').length > 1")
            seen.append(page.run(SETTINGS))
    assert seen == [[True, "0"], [False, "0"]]
