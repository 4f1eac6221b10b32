"""The site is built without a warning, and a browser that opens it fetches nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADED = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc="([^"]*)"|<link([^>]*)>""")
FETCHED = re.compile(r"""@import|url\(["']?(?:https?:)?//""")


@pytest.mark.slow
def test_the_site(tmp_path):
    for module in ("sphinx", "furo", "myst_nb", "ipykernel", "sphinx_copybutton"):
        pytest.importorskip(module)
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    out = tmp_path / "site"
    words = [*build, "-d", str(tmp_path / "cache"), str(ROOT / "docs"), str(out)]
    ended = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    pages = list(out.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for source, link in LOADED.findall(text):
            target = source or re.search(r'href="([^"]*)"', link)[1]
            assert not re.match(r"(https?:)?//", target), (page, target)
        assert "<!-- generated" not in text, page
        assert not re.search(r"<pre>(<[^>]*>)*\$ ", text), page  # a command is copied as it stands
    assert "copybutton.js" in (out / "running.html").read_text(encoding="utf-8")
    for style in out.rglob("*.css"):
        assert not FETCHED.search(style.read_text(encoding="utf-8")), style
    # Executed by the build, not as it was stored.
    notebook = (out / "script" / "digits.html").read_text(encoding="utf-8")
    assert "worse than FP32 by at least" in notebook and "addcdiv_" in notebook
    keys = (out / "reference" / "keys.html").read_text(encoding="utf-8")
    assert "scaler.growth_interval" in keys and "Number of steps without overflow" in keys
    api = (out / "reference" / "api.html").read_text(encoding="utf-8")
    # A `name: text` paragraph of a docstring is a list of parameters.
    assert re.search(r"<strong>norm_dtype</strong>.*parameters, statistics", api)
