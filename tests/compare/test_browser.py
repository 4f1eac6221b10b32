"""The page in a real browser, without a network: what it shows after the browser has read it."""

import re
import shutil
import subprocess

import pytest

from mprun.compare.report import write_report

from .made_comparison import comparison, gan_group, group

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="needs chromium or chrome"),
    pytest.mark.slow,
]


def browse(folder, *arguments: str) -> subprocess.CompletedProcess:
    """One headless run that can reach no host; what the page logs goes to stderr."""
    return subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    return folder, write_report(comparison(group(), gan_group(folder)), folder / "out")


def test_the_browser_shows_tables_figures_and_images_and_logs_nothing(page):
    folder, path = page
    ended = browse(folder, "--dump-dom", path.as_uri())
    assert ended.returncode == 0
    dom = ended.stdout
    tables = re.findall(r'<table class="verdicts">.*?</table>', dom, re.DOTALL)
    assert [table.count("<tr") for table in tables] == [1 + 5, 1 + 3]
    assert dom.count("<svg") == 7 + 7
    assert dom.count("<img") == 3
    assert "CONSOLE" not in ended.stderr, ended.stderr


def requested(folder, uri: str) -> set[str]:
    """Every address that the browser's own network log says was asked for."""
    log = folder / "net.json"
    browse(folder, f"--log-net-log={log}", "--dump-dom", uri)
    return set(re.findall(r'"url":"([^"]+)"', log.read_text(encoding="utf-8")))


def test_the_page_asks_no_server_for_anything(page):
    folder, path = page
    image = "<img src='https://leak.example/x.png'>"
    leaking = path.with_name("leaking.html")
    leaking.write_text(f"<!doctype html>{image}", encoding="utf-8")
    assert "https://leak.example/x.png" in requested(folder, leaking.as_uri())
    own = requested(folder, path.as_uri())  # what the browser asks for itself stays out of this
    assert {url for url in own if "example" in url or "mprun" in url or "w3.org" in url} == set()
    text = path.read_text(encoding="utf-8").replace("</main>", image + "</main>")
    leaking.write_text(text, encoding="utf-8")
    assert "https://leak.example/x.png" not in requested(folder, leaking.as_uri())


def test_a_script_in_the_page_would_not_run(page):
    folder, path = page
    text = path.read_text(encoding="utf-8")
    forged = path.with_name("forged.html")
    script = "<script>document.title='ran'</script>"
    forged.write_text(text.replace("</main>", script + "</main>"), encoding="utf-8")
    ended = browse(folder, "--dump-dom", forged.as_uri())
    assert "<title>ran" not in ended.stdout
    assert "Content Security Policy" in ended.stderr


@pytest.mark.parametrize("width", [420, 1280])
def test_nothing_is_wider_than_the_window(page, width):
    folder, path = page
    # The page itself runs no script, so a frame around it measures: wide content would scroll.
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"<meta http-equiv[^>]*>", "", text)
    measure = "<script>document.title=document.documentElement.scrollWidth+'/'+innerWidth</script>"
    measured = path.with_name(f"measured{width}.html")
    measured.write_text(text.replace("</body>", measure + "</body>"), encoding="utf-8")
    ended = browse(folder, f"--window-size={width},900", "--dump-dom", measured.as_uri())
    inside, window = map(int, re.search(r"<title>(\d+)/(\d+)", ended.stdout).groups())
    assert inside <= window


def test_it_prints(page):
    folder, path = page
    ended = browse(folder, f"--print-to-pdf={folder / 'report.pdf'}", path.as_uri())
    assert ended.returncode == 0
    content = (folder / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF") and 2 <= len(re.findall(rb"/Type ?/Page\b", content)) <= 12
