"""Comparisons made by hand for the tests of what a person looks at: no training, fixed numbers."""

from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from mprun.comparison.findings import Arm, Comparison, Group, Outcome, Row, RunData, Verdict

_PRECISION = {
    "fp32": {"precision.param_dtype": "fp32", "scaler.kind": "none"},
    "fp16_naive": {"precision.param_dtype": "fp16", "scaler.kind": "none"},
    "fp16_master": {"precision.param_dtype": "fp16", "scaler.kind": "none"},
    "fp16_master_scaled": {"precision.param_dtype": "fp16", "scaler.kind": "dynamic"},
    "amp": {"precision.autocast_dtype": "fp16", "scaler.kind": "dynamic"},
}
_ENVIRONMENT = {"mprun": "0.1", "commit": "0123456789abcdef0123456789abcdef01234567"}
_ENVIRONMENT |= {"dirty": False, "python": "3.12.1"}
_ENVIRONMENT |= {"packages": {"torch": "2.13.0", "numpy": "2.1.0"}, "cpu": "Example CPU @ 2.00GHz"}
_ENVIRONMENT |= {"cpu_count": 2, "threads": 1, "device": "cpu"}
_LEVEL = {"fp32": 0.30, "fp16_naive": 0.5, "fp16_master": 0.42, "amp": 0.301}
_SPEED = {"fp32": 1000.0, "fp16_naive": 980.0, "fp16_master": 940.0, "amp": 760.0}


def run(mode: str, seed: int, *, steps=2000, dies_at=None, gan=False, grid=None) -> RunData:
    """One run with a noisy decaying loss; it ends with a non-finite loss where `dies_at` says."""
    rng = np.random.default_rng([seed, len(mode)])
    step = np.arange(1, steps + 1, dtype=float)
    loss = _LEVEL.get(mode, 0.302) + 2.0 * np.exp(-step / (steps / 6))
    loss *= np.exp(rng.normal(0, 0.12, steps))
    scales = mode in ("fp16_master_scaled", "amp")
    skip_steps = np.array([1.0, 2, 3, 4, 900 + 10 * seed]) if scales else np.empty(0)
    skipped = np.isin(step, skip_steps)
    first = (15 if mode == "amp" else 16) if scales else 0
    scale = 2.0 ** (first - np.cumsum(skipped) + scales * np.cumsum(step % 400 == 0))
    end = steps if dies_at is None else dies_at
    if dies_at is not None:
        loss[end - 20 : end] *= np.exp(np.arange(20) * 0.3)
        loss[end - 1] = np.nan
    train = {
        "step": step[:end],
        "updates": (step - np.cumsum(skipped))[:end],
        "skipped": np.cumsum(skipped)[:end].astype(float),
        "loss": loss[:end],
        "loss_scale": scale[:end],
    }
    at = np.arange(steps // 8, end + 1, steps // 8)
    fallen = _LEVEL.get(mode, 0.302) + 2.0 * np.exp(-at / (steps / 6))
    evals = {
        "step": at.astype(float),
        "updates": train["updates"][at - 1],
        "loss": fallen + rng.normal(0, 0.004, len(at)),
    }
    if gan:
        evals |= {"d_loss": evals["loss"], "g_loss": evals["loss"] + 1}
    return RunData(
        path=f"outputs/made/{mode}-s{seed}",
        mode=mode,
        scaler="dynamic" if scales else "none",
        seed=seed,
        status="done" if dies_at is None else "diverged",
        cause=None if dies_at is None else f"loss is nan at step {dies_at}",
        last_step=end,
        evals=evals,
        train=train,
        first_losses=loss[:20],
        last_losses=loss[end - end // 10 : end],
        skipped=int(skipped[:end].sum()),
        skip_steps=skip_steps,
        longest_skip_streak=4 if scales else 0,
        scale_range=(float(scale.min()), float(scale.max())) if scales else None,
        nonfinite_step=dies_at,
        keys={
            "model.name": "dcgan" if gan else "resnet50",
            "data.name": "digits_32",
            "optim.lr": 0.05,
            "train.steps": steps,
            "seed": seed,
            **_PRECISION.get(mode, _PRECISION["amp"]),
        },
        choices={"model": "dcgan" if gan else "resnet50", "precision": mode},
        created=f"2026-01-0{1 + seed % 9}T10:00:00",
        sample="image",
        samples_per_s=_SPEED.get(mode, 1260.0) + seed,
        peak_bytes=(600 if mode == "fp32" else 450) * 2**20,
        memory_measure="process resident set",
        activation_bytes=(40 if mode == "fp32" else 22) * 2**20,
        flags={"cuda.matmul.allow_tf32": False},
        environment=dict(_ENVIRONMENT),
        sample_grid=None if grid is None else str(grid),
    )


def row(runs: list[RunData], verdict: Verdict, label=None, **more) -> Row:
    """A row whose outcomes are the final evaluation losses of its runs."""
    outcomes = [
        Outcome(r.seed, float("nan"), r.cause, r.last_step)
        if r.status == "diverged"
        else Outcome(r.seed, float(r.evals["loss"][-1]))
        for r in runs
    ]
    finite = [o.value for o in outcomes if o.diverged is None]
    scales = [r.scale_range for r in runs if r.scale_range]
    speed = float(np.median([r.samples_per_s for r in runs]))
    own = {k: v for k, v in runs[0].keys.items() if k.startswith(("precision.", "scaler."))}
    base = _PRECISION["fp32"]
    differs = {k: (base.get(k), v) for k, v in own.items() if base.get(k) != v}
    return Row(
        arm=Arm(label or runs[0].mode, runs[0].mode, runs, differs),
        verdict=verdict,
        outcomes=outcomes,
        mean=float(np.mean(finite)) if finite else None,
        skipped=sum(r.skipped for r in runs),
        scale_range=(min(s[0] for s in scales), max(s[1] for s in scales)) if scales else None,
        samples_per_s=speed,
        peak_bytes=max(r.peak_bytes for r in runs),
        **more,
    )


def group(seeds=5, steps=2000) -> Group:
    """FP32 and four modes: diverged, worse, inconclusive and a match."""
    every = list(range(seeds))
    baseline = row([run("fp32", s, steps=steps) for s in every], Verdict("matches", "baseline"))
    margin = 0.01 * baseline.mean

    def judged(name, sentence, difference=None, low=None, high=None, **more):
        parts = [None if v is None else v * baseline.mean for v in (difference, low, high)]
        more |= {"margin": margin, "level": 0.90}
        return Verdict(name, sentence, "paired", every, every, *parts, **more)

    dead = {s: steps // 3 + 50 * s for s in every[::2]}
    verdicts = {
        "fp16_naive": judged(
            "diverged",
            f"diverged in {len(dead)} of {seeds} runs (first at step {min(dead.values())}: "
            f"non-finite loss). FP32 diverged in 0 of {seeds}.",
        ),
        "fp16_master": judged("worse", "worse than FP32 by at least 38.1 %.", 0.401, 0.381, 0.421),
        "fp16_master_scaled": judged(
            "inconclusive",
            "inconclusive: needs about 4 more seeds; the interval (+-1.2 %) is wider than the "
            "margin (+-1 %).",
            *(0.006, -0.006, 0.018),
            needed=4,
        ),
        "amp": judged(
            "matches",
            "matches FP32: difference +0.12 % (90% CI -0.31..+0.55) is inside the +-1 % "
            f"margin, {seeds} seeds.",
            *(0.0012, -0.0031, 0.0055),
        ),
    }
    keys = {"model.name": "resnet50", "data.name": "digits_32", "data.root": '<b>&"quoted"</b>'}
    more = {mode: {"memory_ratio": 0.75, "activation_ratio": 0.55} for mode in verdicts}
    for mode, speedup in zip(verdicts, (0.98, 0.94, 1.26, 0.76), strict=True):
        more[mode]["speedup"] = speedup
    more["fp16_master_scaled"]["notes"] = ["seed 3: failed (out of memory)"]
    more["amp"]["first_steps"] = 0.004
    rows = []
    for mode, verdict in verdicts.items():
        ends = dead if mode == "fp16_naive" else {}
        runs = [run(mode, s, steps=steps, dies_at=ends.get(s)) for s in every]
        rows.append(row(runs, verdict, **more[mode]))
    return Group(
        title="resnet50-digits_32",
        slug="resnet50-digits_32",
        metric="loss",
        higher_is_better=False,
        relative=True,
        margin_setting=0.01,
        baseline=baseline,
        rows=rows,
        keys=keys | {"optim.lr": 0.05, "train.steps": steps},
        notes=["1 run still runs and was left out: outputs/made/amp-s9"],
    )


def write_grid(path: Path, seed: int) -> Path:
    """A PNG of 8 x 8 noisy grey squares, as a grid of generated digits would be."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    tiles = np.kron(rng.uniform(40, 230, (8, 8)), np.ones((64, 64)))
    grey = (tiles + rng.normal(0, 12, tiles.shape)).clip(0, 255).astype("uint8")
    Image.fromarray(grey).save(path)
    return path


def gan_group(folder: Path, seeds=3) -> Group:
    """DCGAN in three modes with sample grids; losses are no outcome, so nothing is judged."""
    arms = []
    for number, mode in enumerate(("fp32", "fp16_master_scaled", "amp")):
        grids = [write_grid(folder / f"{mode}-{s}.png", 10 * number + s) for s in range(seeds)]
        runs = [run(mode, seed, gan=True, grid=grid) for seed, grid in enumerate(grids)]
        verdict = Verdict("not assessed", "not assessed: the losses of a GAN are no outcome.")
        arms.append(row(runs, verdict, speedup=1.1 if number else None))
    return Group(
        title="dcgan-digits_gan",
        slug="dcgan-digits_gan",
        metric="d_loss",
        higher_is_better=False,
        relative=True,
        margin_setting=0.01,
        baseline=arms[0],
        rows=arms[1:],
        keys={"model.name": "dcgan", "data.name": "digits_gan"},
    )


def comparison(*groups: Group, **more) -> Comparison:
    """With a fixed date, so that what is written of it is the same every time."""
    written = {"created": "2026-01-09T12:00:00", "version": "0.1"}
    return Comparison(list(groups) or [group()], **(written | more))


VOID = {"meta", "br", "wbr", "img"}


class Page(HTMLParser):
    """Text by tag, attributes of every element, and a check that every element is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        shown = [data for tag, data in self.texts if tag not in ("style", "script")]
        return " ".join(" ".join(shown).split())
