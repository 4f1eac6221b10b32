"""Aims of `benchmarks.fake_cuda_engines`."""

import pytest

from benchmarks.fake_cuda_engines import MODELS, aims, page

LABEL = "DCGAN b128"


def rows(**changes):
    """The rows of a model, all as it should be but for the changes of `fp16_master_scaled`."""
    found = {}
    for contender, mode in (("mprun", "amp"), ("amp", "amp"), ("mprun", "fp16_master_scaled")):
        for execution in ("eager", "replayed"):
            own = {"peak": 100, "reserved": 100, "launches": 7.0, "triton": 0.0, "library": 2.0}
            own |= {"copies": 1.0, "waits": 0.0, "why_not": None, "execution": execution}
            own["work"] = 10.0 if execution == "replayed" else None
            if mode == "fp16_master_scaled":
                own |= changes
            found[LABEL, mode, contender, execution] = own
    return found


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"peak": 101}, ["peak of DCGAN b128 in fp16_master_scaled, at most torch.amp's"]),
        ({"copies": 2.0}, ["launches of DCGAN b128 in fp16_master_scaled, at most amp's"]),
        ({"waits": 1.0}, ["waits, eager and replayed, none"]),
        ({"work": None, "why_not": "no"}, ["steps captured as one graph, all"]),
    ],
)
def test_what_misses_an_aim(changes, missed):
    here = rows(**changes)
    assert [what for what, _, met in aims(here, rows()) if not met] == missed
    about = dict.fromkeys(("date", "machine", "torch", "python", "other", "this", "command"), "x")
    assert page(about, here, rows()).count("| missed |") == len(missed)


def test_a_peak_is_held_to_the_other_checkout():
    def of_gpt(peak):
        found = rows(peak=peak)
        key = LABEL, "fp16_master_scaled", "mprun", "eager"
        return found | {("GPT-2 b12", "fp16_master", "mprun", "eager"): found[key]}

    missed = [what for what, _, met in aims(of_gpt(102), of_gpt(100)) if not met]
    assert "peak of GPT-2 b12 in fp16_master, at most 1.01 of there" in missed


def test_models_of_the_suite_are_there():
    from benchmarks.suite.models import GPU_SUITE

    assert {label for label, (words, _) in MODELS.items() if not words} <= {
        group.label for group in GPU_SUITE
    }
