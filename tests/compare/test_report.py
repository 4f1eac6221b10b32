"""report.html as a file: what it says, what it needs, how large it is."""

import base64
import hashlib
import io
import json
import re
from dataclasses import replace

import pytest
from PIL import Image

from mprun.comparison import compare
from mprun.comparison.findings import VERDICTS, Arm, Comparison, Gap, Row, Verdict
from mprun.comparison.report import LIMIT, write_folder
from mprun.comparison.wording import answer, answers
from mprun.plots.panel import MARKS

from .made_comparison import Page, comparison, gan_group, group
from .run_folders import write_run


def written(a_comparison: Comparison, folder) -> tuple[str, Page]:
    text = write_folder(a_comparison, folder).read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """The page of one group with every kind of verdict, and its folder."""
    folder = tmp_path_factory.mktemp("usual")
    return *written(comparison(), folder), folder


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """The page of a GAN without one grid of seed 0, of a baseline alone, of a mode that failed."""
    folder = tmp_path_factory.mktemp("several")
    gan, alone, failed = gan_group(folder), group(3, 400), replace(group(3, 400), slug="failed")
    gan.rows[0].arm.runs[0].sample_grid = None
    for run in (*alone.every_run, *failed.every_run):
        run.train = {}  # fewer curves to draw
    arm = Arm("amp", "amp", [], notes=["seed 0: failed (out of memory)"])
    empty = Row(arm, Verdict("inconclusive", "needs at least 3 seeds (has 0).", needed=3), [])
    alone, failed = replace(alone, rows=[]), replace(failed, rows=[empty])
    return written(comparison(gan, alone, failed), folder / "out")


def test_the_answers_come_first_then_the_table_and_figures_and_the_rest_is_folded(usual):
    page = usual[1]
    order = [
        "resnet50-digits_32: does lower precision match FP32?",
        "so that only precision differs. A mode matches if the interval of its loss lies within ±1",
        "fp16_naive diverged in 3 of 5 runs.",
        "amp matches FP32.",
        "positive is worse",
        "Matches = interval inside the shaded margin",
        "Difference to FP32 over steps: loss",
        "Training loss over steps",
        "Loss scale",
        "More figures",
        "Training loss over applied updates",
        "Evaluation: loss",
        "Throughput",
        "Peak memory",
        "Each verdict in a sentence",
        "worse than FP32 by at least 38.1 %.",
        "Outcome per seed",
        "How the verdict is made",
        "Configuration",
        "Environment",
    ]
    places = [page.words.index(text) for text in order]
    assert places == sorted(places)
    shown = re.sub(r"<details.*</details>", "", usual[0], flags=re.DOTALL)
    assert shown.count("<svg") == 4 and "Outcome per seed" not in shown


@pytest.mark.slow
def test_the_page_says_what_its_experiment_tests(tmp_path):
    one = group(seeds=3, steps=400)
    for every in one.every_run:
        every.choices["experiment"] = "quickstart_lost_updates"
    text = written(comparison(one), tmp_path)[1].words
    assert "most updates are smaller than half a step of an FP16 weight. A mode matches if" in text


def test_modes_that_simply_match_share_an_answer():
    one = group(seeds=3, steps=400)
    for row in one.rows[1:]:
        row.verdict.name = "matches"
    assert answers(one)[1:] == [("matches", "fp16_master, fp16_master_scaled and amp match FP32.")]
    one.rows[1].gap = Gap("loss", True, "%", None, "grows", ".")
    assert answers(one)[1:] == [
        ("matches", "fp16_master matches FP32. Its difference grows over steps."),
        ("matches", "fp16_master_scaled and amp match FP32."),
    ]


def test_the_table_has_the_numbers_of_each_mode(usual):
    text = usual[0]
    table = re.search(r'<table class="verdicts">.*?</table>', text, re.DOTALL)[0]
    rows = re.findall(r"<tr.*?</tr>", table, re.DOTALL)
    _, _, naive, _, _, amp = (" ".join(re.sub(r"<[^>]+>", " ", row).split()) for row in rows)
    assert amp.startswith("amp ✓ matches 0.3049 +0.12 % (-0.31 to +0.55) 0-4 25")
    assert amp.endswith("0.76x 0.75x 0.55x")
    assert "fp16_ naive ✗ diverged 0.5052 (seeds 1, 3)" in naive
    assert "±1 % of FP32" in usual[1].words
    assert "Numerics" not in text  # without probes


@pytest.mark.slow
@pytest.mark.parametrize("of", ["usual", "several"])
def test_the_page_needs_nothing_but_itself(of, request):
    text, page, *_ = request.getfixturevalue(of)
    tags = {name for name, _ in page.elements}
    assert not tags & {"link", "iframe", "object", "embed", "base", "form"}
    # One script, which is the one that the policy of the page lets run.
    (script,) = (data for tag, data in page.texts if tag == "script")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (a["content"] for a in page.all("meta") if "http-equiv" in a)
    assert policy.endswith(f"; script-src 'sha256-{digest}'") and page.all("script") == [{}]
    assert not re.search(r"eval|Function\(|fetch|XMLHttp|import|https?:(?!//www.w3.org)", script)
    assert len(script.splitlines()) <= 200
    keys = ("src", "href", "xlink:href")
    sources = [a[key] for _, a in page.elements for key in keys if key in a]
    assert all(source.startswith(("#", "data:image/jpeg;base64,")) for source in sources)
    assert "@import" not in text and set(re.findall(r"url\((.)", text)) <= {"#"}
    assert not any(name.startswith("on") for _, a in page.elements for name in a)


@pytest.mark.slow
def test_ids_are_unique_and_every_figure_can_be_read_out(tmp_path):
    _, page = written(comparison(group(), replace(group(), slug="other")), tmp_path)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    figures = page.all("svg")
    assert len(figures) == 18
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in figures)


@pytest.mark.slow
def test_every_configuration_value_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>\"'&"
    one = group(seeds=3, steps=400)
    run = one.rows[0].arm.runs[0]
    for target in (run.keys, run.environment, run.flags, one.keys):
        target[evil] = evil
    arm = replace(one.rows[0].arm, label=evil, notes=[evil], differs={evil: (evil, evil)})
    outcome = replace(one.rows[0].outcomes[0], diverged=evil)
    verdict = replace(one.rows[0].verdict, sentence=evil)
    row = replace(one.rows[0], arm=arm, outcomes=[outcome], verdict=verdict, notes=[evil])
    one = replace(one, title=evil, metric=evil, notes=[evil], rows=[row])
    made = replace(comparison(one), stamps=[evil], not_compared=[evil], created=evil, version=evil)
    text, page = written(made, tmp_path)
    assert text.count("<script") == 1 and len(page.all("script")) == 1
    assert page.words.count("<script>alert(1)</script>") >= 10
    modes = json.loads(next(a for a in page.all("div") if "data-modes" in a)["data-modes"])
    assert modes[1]["label"] == evil


@pytest.mark.slow
def test_the_same_comparison_gives_the_same_files(tmp_path):
    for name in ("a", "b"):
        write_folder(comparison(group(steps=400)), tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert {"report.html", "resnet50-digits_32-loss-steps.png"} <= set(files)
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.slow
def test_the_top_tells_what_was_run_where_with_what_and_when(usual, tmp_path):
    facts = re.search(r'<dl class="facts">.*?</dl>', usual[0], re.DOTALL)[0]
    told = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", facts))
    runs = {"Model": "resnet50", "Runs": "25, in 5 modes, seeds 0-4", "Steps": "2000"}
    where = {"Hardware": "Example CPU @ 2.00GHz, 1 thread", "torch": "2.13.0"}
    assert told == {**runs, **where, "Date": "2026-01-01 to 2026-01-05"}
    one = group(seeds=3, steps=400)
    for run in one.every_run:
        run.choices["data"], run.keys["data.batch_size"] = "digits_32", 64
        run.environment["gpu"], run.half_products = "Example GPU", "native-fp16"
    text, _ = written(comparison(one), tmp_path)
    told = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert told["Data"] == "digits_32, batches of 64" and told["Hardware"] == "Example GPU"
    assert told["16-bit products"] == "native fp16"


@pytest.mark.slow
def test_stamps_and_what_was_left_out_are_told(tmp_path):
    one = group(seeds=3, steps=400)
    one.rows[3].arm.runs[0].environment["cpu"] = "Another CPU"
    made = comparison(one, stamps=["--allow optim.lr"], not_compared=["x/amp-s0: no FP32 run"])
    _, page = written(replace(made, looks=[3, 5, 10], alpha=0.0263), tmp_path)
    before_the_table = page.words.split("positive is worse")[0]
    assert "Not the comparison that the runs were set up for: --allow optim.lr" in before_the_table
    assert "x/amp-s0: no FP32 run" in page.words
    assert "Planned at 3, 5, 10 seeds" in page.words and "at α = 0.0263 each" in page.words
    assert "the error rate over all of them stays 5 %" in page.words
    assert "Not the same in all runs: cpu : Example CPU @ 2.00GHz" in page.words
    assert "Another CPU (amp)" in page.words


@pytest.mark.slow
def test_a_cpu_is_named_as_such_and_a_gpu_and_emulated_speed_are_not(usual, tmp_path):
    assert "says nothing about a GPU" in usual[1].words
    assert "The resident set is that of the whole process" in usual[1].words
    one = group(seeds=3, steps=400)
    for run in one.every_run:
        run.environment["device"], run.memory_measure = "cuda", "CUDA allocated"
    _, page = written(comparison(one), tmp_path / "cuda")
    assert "says nothing about a GPU" not in page.words
    assert "measured as: CUDA allocated" in page.words
    for run in one.every_run:
        run.half_products = "emulated-fp16"
    text, page = written(comparison(one), tmp_path / "emulated")
    table = re.search(r'<table class="verdicts">.*?</table>', text, re.DOTALL)[0]
    assert "speed" not in table and "peak memory" not in table and "0.55x" in table
    assert "Speed and peak memory are left out: 16-bit products were emulated" in page.words
    assert "images/s" not in page.words


def test_settings_that_differ_from_the_baseline_are_listed_with_their_modes(usual):
    words = usual[1].words
    assert "precision.param_dtype=fp32 in FP32, fp16 in fp16_naive, fp16_master" in words
    assert "precision.autocast_dtype=null in FP32, fp16 in amp" in words
    assert "scaler.kind=none in FP32, dynamic in fp16_master_scaled, amp" in words


@pytest.mark.slow
def test_a_baseline_alone_and_a_mode_whose_runs_all_failed_are_still_told(several):
    words = several[1].words
    assert "amp is undecided: it needs about 3 more seeds." in words
    assert "seed 0: failed (out of memory)" in words
    assert words.count("fp32 baseline") == 3


@pytest.mark.slow
def test_a_foreign_log_is_told_as_what_it_is(tmp_path):
    one = group(seeds=3, steps=400)
    one.rows[:] = one.rows[3:]
    for run in one.every_run:
        run.foreign, run.keys, run.environment, run.flags = True, {}, {}, {}
        run.evals["train/loss"] = run.evals["loss"]
    one = replace(one, metric="train/loss", keys={}, by_seed=False)
    _, page = written(comparison(one), tmp_path)
    assert "mean of train/loss over the last tenth of the steps" in page.words
    assert "progress" not in page.words and "Not recorded." in page.words
    assert "Training loss over" not in page.words and "which are not paired; above" in page.words
    assert (tmp_path / f"{one.slug}-eval-train_loss.png").is_file()


def test_grids_of_the_same_seed_stand_side_by_side(several):
    page = several[1]
    images = page.all("img")
    assert [image["alt"] for image in images] == [
        f"Generated images of {mode}, seed 1" for mode in ("fp32", "fp16_master_scaled", "amp")
    ]
    data = base64.b64decode(images[0]["src"].partition(",")[2])
    with Image.open(io.BytesIO(data)) as shown:
        assert shown.format == "JPEG" and shown.size == (360, 360)
    assert "without a metric of the samples there is no verdict" in page.words


@pytest.mark.slow
def test_a_grid_that_cannot_be_read_is_told(tmp_path):
    one = gan_group(tmp_path, seeds=1)
    (tmp_path / "amp-0.png").write_bytes(b"no image")
    _, page = written(comparison(one), tmp_path / "out")
    assert len(page.all("img")) == 2
    assert "amp, seed 0: not readable" in page.words


@pytest.mark.slow
def test_several_groups_get_fewer_points_but_all_their_figures(tmp_path):
    groups = [replace(group(3, 800), slug=f"g{i}", title=f"g{i}") for i in range(6)]
    text, page = written(comparison(*groups), tmp_path)
    assert len(text.encode()) < LIMIT and len(page.all("svg")) == 6 * 9
    assert "6 configurations" in page.words
    # And so have five modes of twenty seeds.
    text, page = written(comparison(group(seeds=20)), tmp_path / "seeds")
    assert len(text.encode()) < LIMIT and len(page.all("svg")) == 9


@pytest.mark.slow
def test_many_groups_keep_the_decision_and_name_the_files_of_the_rest(tmp_path):
    groups = [replace(group(3, 2000), slug=f"g{i}", title=f"g{i}") for i in range(25)]
    text, page = written(comparison(*groups), tmp_path)
    assert len(text.encode()) < LIMIT
    shown = [svg["aria-label"].split(",")[0] for svg in page.all("svg")]
    assert shown.count("Interval plot") == 25
    assert len(shown) == 50 or "Left out to keep the page below 1 MB" in page.words
    assert (tmp_path / "g24-difference.png").is_file()


def test_nothing_to_compare_is_still_a_page(tmp_path):
    _, page = written(Comparison([], not_compared=["x: no FP32 run"]), tmp_path)
    assert "Nothing was compared." in page.words and "x: no FP32 run" in page.words


@pytest.mark.parametrize("name", VERDICTS)
def test_every_verdict_gives_an_answer(name):
    one = group(seeds=3, steps=400)
    row = replace(one.rows[3], verdict=replace(one.rows[3].verdict, name=name))
    text = answer(one, row)
    assert text.startswith("amp") and text.endswith(".")
    said = {"diverged": "diverged in 0 of 3", "inconclusive": "undecided"}
    said["invalid baseline"] = "FP32 itself diverged"
    assert said.get(name, name.removesuffix("s")) in text
    assert set(MARKS) == set(VERDICTS)


def test_figures_beside_the_page_are_images_of_a_readable_size(usual):
    paths = list(usual[2].glob("*.png"))
    assert len(paths) == 9
    for path in paths:
        with Image.open(path) as image:
            assert image.width == 800 and image.height > 200


def test_an_answer_about_a_part_of_the_runs_says_so():
    one = group()
    row = one.rows[0]
    row.verdict.name, row.verdict.left_out = "matches", ["having no partner: seed 3 of this mode"]
    assert answer(one, row).endswith("matches FP32 in what was compared, which is not all.")


@pytest.mark.slow
def test_control_characters_of_a_record_reach_no_file(tmp_path):
    text = "\x1b]0;x\x07\x9b2J\u202e"
    write_run(tmp_path / "runs" / "a", choices={"model": text, "data": "d"})
    write_run(tmp_path / "runs" / "b", "amp", choices={"model": text, "data": "d"})
    report = compare([tmp_path / "runs"]).write(tmp_path / "out")
    for path in (report, *report.parent.glob("*.md"), report.parent / "results.json"):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", path.read_text()), path
        assert "u001b]0;x" in path.read_text() or "\\x1b]0;x" in path.read_text(), path
