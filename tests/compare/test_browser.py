"""The page in a real browser, without a network: what it shows after the browser has read it."""

import re
import shutil
import subprocess
from html import escape

import pytest

from mprun.comparison.report import write_folder

from .made_comparison import comparison, gan_group, group

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = """
--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --enable-logging=stderr
"""
missing = pytest.mark.skipif(BROWSER is None, reason="needs chromium or chrome")
pytestmark = [missing, pytest.mark.slow]


def browse(folder, *arguments: str) -> subprocess.CompletedProcess:
    """One headless run that can reach no host; what the page logs goes to stderr."""
    own = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}"]
    command = [BROWSER, *OPTIONS.split(), *own, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    return folder, write_folder(comparison(group(), gan_group(folder)), folder / "out")


def test_the_browser_shows_tables_figures_and_images_and_logs_nothing(page):
    folder, path = page
    ended = browse(folder, "--dump-dom", path.as_uri())
    dom = ended.stdout
    tables = re.findall(r'<table class="verdicts">.*?</table>', dom, re.DOTALL)
    assert [table.count("<tr") for table in tables] == [1 + 5, 1 + 3]
    assert dom.count("<svg") == 9 + 7
    # The page's own policy lets its own script run: a button for each mode.
    assert dom.count("<button") == 5 + 3
    assert dom.count("<img") == 3
    assert ended.returncode == 0 and "CONSOLE" not in ended.stderr, ended.stderr


def changed(path, name: str, old: str, new: str):
    """A copy of the page beside it, with one thing replaced."""
    copy = path.with_name(f"{name}.html")
    copy.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    return copy


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
    leaking = changed(path, "leaking", "</main>", image + "</main>")
    assert "https://leak.example/x.png" not in requested(folder, leaking.as_uri())


def test_a_script_in_the_page_would_not_run(page):
    folder, path = page
    forged = changed(path, "forged", "</main>", "<script>document.title='ran'</script></main>")
    ended = browse(folder, "--dump-dom", forged.as_uri())
    assert "<title>ran" not in ended.stdout
    assert "Content Security Policy" in ended.stderr


DRIVER = r"""
<pre id="seen"></pre><script>
const figure = document.querySelector('[id] figure[data-live*="log"]');
const svg = figure.querySelector('svg'), tip = figure.querySelector('.tip');
const curve = svg.querySelector('[data-series="4"] path:not(defs *)');
const seen = [], say = (text) => seen.push(text.replace(/\s+/g, ' '));
svg.setPointerCapture = () => {};
function send(name, across, down) {
  const box = svg.getBoundingClientRect(), frame = JSON.parse(figure.dataset.live).frame;
  svg.dispatchEvent(new PointerEvent(name, { bubbles: true, button: 0, pointerId: 1,
    clientX: box.left + box.width * (frame[0] + (frame[2] - frame[0]) * across),
    clientY: box.top + box.height * (frame[1] + (frame[3] - frame[1]) * down) }));
}
const before = curve.getAttribute('d').match(/[\d.]+/g).map(Number);
say(`hidden ${tip.hidden}`);
send('pointermove', 0.5, 0.5);
say(tip.innerText);
send('pointerdown', 0.5, 0.2); send('pointermove', 0.75, 0.7); send('pointerup', 0.75, 0.7);
say([...svg.querySelectorAll('.own-ticks text')].map((text) => text.textContent).join(' '));
send('pointermove', 0.005, 0.5);
say(tip.querySelector('b').innerText);
svg.dispatchEvent(new MouseEvent('dblclick'));
const after = curve.getAttribute('d').match(/[\d.]+/g).map(Number);
say(`back ${before.every((at, i) => Math.abs(at - after[i]) < 0.01)}`);
document.querySelectorAll('.modes button')[4].click();
send('pointermove', 0.5, 0.5);
say(`amp ${getComputedStyle(curve.closest('g[data-series]')).display} ${tip.innerText}`);
document.getElementById('seen').textContent = seen.join('\n');
</script></body>"""


def test_values_zoom_and_toggling_answer(page):
    folder, path = page
    text = re.sub(r"<meta http-equiv[^>]*>", "", path.read_text(encoding="utf-8"))
    driven = path.with_name("driven.html")
    driven.write_text(text.replace("</body>", DRIVER), encoding="utf-8")
    ended = browse(folder, "--window-size=1280,900", "--dump-dom", driven.as_uri())
    seen = re.search(r'<pre id="seen">(.*?)</pre>', ended.stdout, re.DOTALL)[1].split("\n")
    assert seen[0] == "hidden true"
    value = r"[\d.]+ "
    modes = ("fp16_naive", "fp16_master", "fp16_master_scaled", "amp")
    middle = r"step (99\d|1,00\d)"
    assert re.match(rf"{middle} fp32 {value}" + value.join(f"{m} " for m in modes), seen[1])
    # A quarter of the steps from the middle on, and half of the height.
    assert seen[2].startswith("1,200 1,400 ") and len(seen[2].split()) > 3
    assert re.match(middle, seen[3]) and seen[4] == "back true"
    assert seen[5].startswith("amp none step") and seen[5].count("amp") == 1


def measured(folder, path, width: int, opened: str) -> list[int]:
    """Width and height of what a page holds in a frame: no window is as narrow as a phone."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", path.read_text(encoding="utf-8"))
    measure = (
        f"const page = this.contentDocument; page.querySelectorAll('{opened}').forEach("
        "(one) => one.open = true); const { scrollWidth, scrollHeight } = page.documentElement;"
        "document.title = `${scrollWidth} ${scrollHeight}`"
    )
    frame = f'<iframe width={width} height=700 onload="{measure}" srcdoc="{escape(text)}"></iframe>'
    framed = path.with_name(f"measured{width}{opened}.html")
    framed.write_text(f"<!doctype html><title></title>{frame}", encoding="utf-8")
    ended = browse(folder, "--window-size=1400,900", "--dump-dom", framed.as_uri())
    return [*map(int, re.search(r"<title>(\d+) (\d+)", ended.stdout).groups())]


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window_also_unfolded(page, width):
    for opened in ("details", "no-details"):
        assert measured(*page, width, opened)[0] <= width


def test_a_group_fills_three_screens(page):
    folder, _ = page
    path = write_folder(comparison(group()), folder / "one")
    assert measured(folder, path, 1280, "no-details")[1] <= 3 * 800
    assert measured(folder, path, 1280, "details")[1] > 3 * 800


def pages(folder, path) -> int:
    """How many a page has in print."""
    printed = path.with_suffix(".pdf")
    assert browse(folder, f"--print-to-pdf={printed}", path.as_uri()).returncode == 0
    return len(re.findall(rb"/Type ?/Page\b", printed.read_bytes()))


def test_it_prints_with_what_is_folded(page):
    folder, path = page
    folded = changed(path, "folded", "details::details-content", "details.none")
    assert pages(folder, folded) < pages(folder, path) <= 12
