"""Which cells a sweep has and what they are called; nothing is written."""

import pytest

from mprun.config.compose import compose_config
from mprun.errors import BadInput
from mprun.sweeps.plan import plan

from ..helpers import raises_line


@pytest.fixture(autouse=True)
def nothing_written(tmp_path):
    yield
    assert list(tmp_path.iterdir()) == []


def names(*overrides: str) -> list[str]:
    return [cell.directory.name for cell in plan(list(overrides), None).cells]


@pytest.mark.slow
def test_every_cell_is_named_apart():
    swept = ["model=lstm_lm,dcgan", "precision=glob(fp16*)", "seed=range(0,2)"]
    both = plan(swept, None)
    assert len(both.cells) == len({cell.directory for cell in both.cells}) == 2 * 3 * 2
    assert len({cell.config_hash for cell in both.cells}) == len(both.cells)
    folders = {cell.directory.parent.name for cell in both.cells}
    assert folders == {"lstm_lm-docs_words", "dcgan-digits_gan"}
    assert {cell.directory.parent.parent for cell in both.cells} == {both.root}
    # One model and data set: the folder of the single runs is the folder of the sweep.
    same = plan(swept[1:], None)
    assert {cell.directory.parent for cell in same.cells} == {same.root}
    assert {c.directory for c in same.cells} <= {c.directory for c in both.cells}


@pytest.mark.parametrize(
    ("swept", "expected"),
    [
        ("device=cpu,auto", ["fp32-device=cpu-s0", "fp32-device=auto-s0"]),
        ("threads=1,2", ["fp32-threads=1-s0", "fp32-threads=2-s0"]),
        ("train.log_every=5,6", ["fp32-train.log_every=5-s0", "fp32-train.log_every=6-s0"]),
        ("train.keep_checkpoints=2,3", [f"fp32-train.keep_checkpoints={n}-s0" for n in (2, 3)]),
        ("name=a,b", ["fp32-a-s0", "fp32-b-s0"]),
        ("++seed=1,2", ["fp32-s1", "fp32-s2"]),
        ("precision=amp,fp32", ["amp-s0", "fp32-s0"]),
    ],
)
@pytest.mark.few(2)
def test_what_is_swept_is_in_the_name(swept, expected):
    assert names(swept) == expected


@pytest.mark.parametrize("form", ["{},{}", "choice({},{})", "shuffle({},{})", "choice({}, '{}')"])
def test_a_sweep_over_places_of_data(tmp_path_factory, form):
    places = [tmp_path_factory.mktemp("images") for _ in range(2)]
    root = f"data.root={form.format(*places)}"
    swept = plan(["model=resnet50", "data=image_folder", root], None)
    assert len({cell.directory for cell in swept.cells}) == 2
    found = [dict(cell.data_places)["root"] for cell in swept.cells]
    found = sorted(found) if "shuffle" in form else found  # whose order is by chance
    assert found == list(map(str, places))
    assert all("-data.root=" in cell.directory.name for cell in swept.cells)


@pytest.mark.slow
def test_what_is_not_swept_is_named_as_in_a_single_run():
    fixed = ["device=cpu", "optim.lr=0.05", "threads=1", "train.clip_norm=2.0"]
    expected = compose_config([*fixed, "seed=3"]).place().name
    assert expected == "fp32-optim.lr=0.05-train.clip_norm=2.0-s3"
    assert names(*fixed, "seed=3,4")[0] == expected
    # The order of the command line, as a single run has it.
    assert names("optim.lr=0.05,0.1", *fixed[-1:])[0].startswith("fp32-optim.lr=0.05-train.clip")


@pytest.mark.slow
def test_values_that_a_file_name_cannot_hold_stay_apart():
    found = names("precision.overrides.lstm*=fp32,fp16", "precision.overrides.de?oder=fp32,fp16")
    assert len(set(found)) == 4
    found = names("optim.schedule=step", "optim.milestones=[0.5],[0.5,0.75],[0.75]")
    assert len(set(found)) == 3 and all("optim.milestones=_0.5" in name for name in found[:2])


@pytest.mark.slow
def test_long_names_are_cut_in_what_is_not_swept():
    fixed = [f"precision.overrides.layer_number_{n}=fp32" for n in range(9)]
    found = names(*fixed, "threads=1,2", "train.log_every=7,8")
    assert len(set(found)) == 4 and max(map(len, found)) <= 200
    assert all("threads=" in name and "train.log_every=" in name for name in found)
    # Other fixed values, other names.
    assert not set(found) & set(names(*fixed[1:], "threads=1,2", "train.log_every=7,8"))
    # Even when the swept part alone is too long.
    found = names(*(f"precision.overrides.{letter * 90}=fp32,fp16" for letter in "ab"))
    assert len(set(found)) == 4 and max(map(len, found)) <= 200


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["output_root=a,b"], "output_root: must be one value"),
        (["resume=a", "seed=0,1"], "resume"),
        (["seed=0,1", "hydra/launcher=basic"], "must be one of joblib, submitit_local"),
        (["seed=0,1", "hydra/launcher=jobli"], "did you mean 'joblib'"),
        (["seed=0,1", "hydra/launcher=joblib,submitit_local"], "one plain value"),
        (["seed=0,1", "hydra.launcher.n_jobs=2"], "needs hydra/launcher="),
        (["seed=0,1", "hydra/launcher=joblib", "+hydra.launcher.foo=2"], "one plain value"),
        (["seed=0,1", "hydra/launcher=joblib", "hydra.launcher._target_=os.system"], "_target_"),
        (["seed=0,1", "hydra/launcher=submitit_local", "hydra.launcher.nodes=2"], "nodes"),
        (["seed=0,1", "hydra.sweep.dir=/tmp/x"], "hydra.sweep.dir"),
        (["seed=0,1", "hydra/sweeper=basic"], "hydra/sweeper"),
    ],
)
def test_what_no_sweep_can_be(overrides, message):
    with raises_line(BadInput, message):
        plan(overrides, None)
