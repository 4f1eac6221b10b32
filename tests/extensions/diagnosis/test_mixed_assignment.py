"""`mprun advise --budget`: the set that is found meets its bound, costs little, and is a mode."""

from dataclasses import replace

import pytest
import yaml

from mprun.cli import main
from mprun.config.compose import compose_config
from mprun.extensions.diagnosis.mixed_assignment import Part, mode_file, products_of, search
from mprun.extensions.diagnosis.trials import Budget, Course, Tried

from ...helpers import TINY_GPT, refused
from ...numerics.small_runs import as_json
from .planted import NETWORKS

OFFSET = [*NETWORKS["offset.a"].words, "train.steps=60"]


class Trials:
    """Whose losses add up: what a part costs while it is in the mode."""

    def __init__(self, costs, budget=None):
        self.costs, self.budget, self.fp32 = costs, budget or Budget(), Course([1.0])

    def result(self, mode, limit):
        loss = 1 + sum(cost for name, cost in self.costs.items() if name not in mode)
        return Tried(mode, loss <= limit, "", loss, 1)


def found(costs, products, bound):
    parts = [Part((name,), 0.0, share) for name, share in products.items()]
    names = lambda out: tuple(part.patterns[0] for part in out)  # noqa: E731
    return search(Trials(costs), parts, names, bound)


def test_the_search_by_hand():
    """The order is wrong: `dear` loses nothing and comes first, so it returns to the mode."""
    products = {"dear": 0.6, "first": 0.1, "second": 0.2, "third": 0.1}
    costs = {"dear": 0.0, "first": 0.5, "second": 0.3, "third": 0.01}
    mixed = found(costs, products, 0.02)
    assert mixed.out == ["first", "second"]
    assert mixed.gap == pytest.approx(0.01) and mixed.products == pytest.approx(0.3)
    assert found(costs, products, 1.0).out == []  # the mode as it is
    none = found(costs | {"nobody": 0.5}, products, 0.02)
    assert none.out is None and not any(one.cures for one in none.tried)


def test_products_by_hand(build_run):
    built = build_run(*OFFSET, "precision=fp32")
    shares = products_of(built)
    layers = {n: m for n, m in built.task.learner.model.named_modules() if n in shares}
    sizes = {name: layer.weight.numel() for name, layer in layers.items()}
    assert shares == pytest.approx({n: size / sum(sizes.values()) for n, size in sizes.items()})


@pytest.mark.slow
def test_the_part_that_bf16_swamps_leaves_and_the_file_is_a_mode(tmp_path, capsys):
    """20000 is added and subtracted in `shift`, which has no product: it costs none to leave."""
    mine, path = tmp_path / "mine", tmp_path / "run"
    line = [*OFFSET, "precision=bf16_master", f"output_dir='{path}'", "--budget", "10"]
    line += ["--seconds", "600", "--write", str(mine)]
    mixed = as_json(capsys, "advise", *line)["mixed"]
    assert mixed["out"] == ["shift"] and mixed["products"] == 0 and mixed["gap"] <= 0.1
    assert mixed["tried"][0]["cures"] is False  # the mode as it is
    content = yaml.safe_load((mine / "precision" / "bf16_master_mixed.yaml").read_text())
    assert content["overrides"] == {"shift": "fp32"} and content["name"] == "bf16_master_mixed"
    again = [*OFFSET, "precision=bf16_master_mixed", f"output_dir='{tmp_path / 'mixed'}'"]
    assert main(["--config-dir", str(mine), *again]) == 0
    assert f"--config-dir {mine}" in mixed["command"]
    # Nothing is overwritten, and that is said before anything is trained.
    says = "bf16_master_mixed.yaml exists already and is not overwritten"
    other = tmp_path / "other"
    refused(capsys, "advise", *line[:-6], f"output_dir='{other}'", *line[-6:], says=says)
    assert not other.exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--write", "x"], "--write x: is only allowed with --budget X"),
        (["--budget", "-1"], "--budget -1: must be a percentage from 0 to 1000"),
        (["--budget", "1", "--write", "x", "--config-dir", "."], "must be the same folder as"),
    ],
)
def test_what_does_not_fit_together_is_refused(capsys, more, says):
    refused(capsys, "advise", *TINY_GPT, *more, says=says)


@pytest.mark.slow
def test_a_layer_whose_inputs_vanish_in_the_cast_is_left_out_and_the_rest_trains(tmp_path, capsys):
    """One number of an input in 16 is 10^7: FP8 with one scale of a tensor sinks all others."""
    line = [*NETWORKS["outlier_sample.a"].words, "train.steps=60"]
    line += [f"output_dir='{tmp_path / 'run'}'", "precision=fp8_tensorwise", "--seconds", "600"]
    content = as_json(capsys, "advise", *line)
    assert content["casts"]["excluded"] == ["first"]
    without_first = 'precision.matmul.modules=["*","!first"]'
    assert content["casts"]["command"].endswith(f"'{without_first}'")
    modes = {" ".join(one["overrides"]): one["cures"] for one in content["tried"]}
    assert modes[f"precision=fp8_tensorwise {without_first}"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "scaler"),
    [
        (["precision=fp16_master_scaled", "precision.overrides.a.*.forward=fp32"], "dynamic"),
        (["precision=nvfp4", 'precision.matmul.modules=["*","!last 15%"]'], "none"),
        (["precision=fp8_delayed", "precision.update.state_dtype=bf16"], "none"),
        (["precision=amp"], "dynamic"),
    ],
)
def test_a_mode_file_composes_to_the_mode(tmp_path, mode, scaler):
    wanted = compose_config(mode).config.precision
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision/mine.yaml").write_text(mode_file(wanted, "mine", scaler, "about"))
    found = compose_config(["precision=mine"], str(tmp_path)).config
    assert found.precision == replace(wanted, name="mine") and found.scaler.kind == scaler
