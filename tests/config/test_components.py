"""Components: a package adds its own, and each is known at few places."""

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

import mprun
from mprun.assembly.data import arguments_of
from mprun.config.components import COMPONENTS, NETWORKS, SOURCES, TASKS
from mprun.config.option_files import named, option_files
from mprun.data.augmentation import Augmentation
from mprun.data.source import Serving
from mprun.data.token_streams import Windows
from mprun.entry_points import loaded

from ..cli.test_contributing import block
from ..helpers import record_of, rows_of, settings_of

FILES = ("perceptrons/components.py", "perceptrons/network.py", "perceptrons/steps.py")
FILES += ("perceptrons/conf/model/perceptron.yaml", "perceptrons/conf/optim/nadam.yaml")
RUN = ["model=perceptron", "train.steps=2", "device=cpu", "output_dir=run"]


@pytest.fixture
def command(tmp_path):
    """`command(*words)`: mprun beside an installed package, that of docs/extend.md."""
    site = tmp_path / "site"
    about = site / "perceptrons-1.dist-info"
    for file in FILES:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(block(file), encoding="utf-8")
    for group, name in (("scaler", "power"), ("precision", "bits")):
        option = site / "perceptrons" / "conf" / group / f"{name}.yaml"
        option.parent.mkdir()
        option.write_text(f"# Of a stranger\ndefaults: [/schema/{group}/{name}@_here_]\n")
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: perceptrons\nVersion: 1\n")
    ((group, entries),) = tomllib.loads(block("pyproject.toml"))["project"]["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (about / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")

    def run(*words):
        root = str(Path(mprun.__file__).parents[1])
        path = os.pathsep.join([str(site), root])
        how = {"capture_output": True, "text": True, "cwd": tmp_path}
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.run([sys.executable, "-m", "mprun", *words], env=environment, **how)

    return run


@pytest.mark.slow
def test_an_installed_package_adds_a_network(command, tmp_path):
    shown = command("--help", "model").stdout
    assert "A perceptron on embedded digits" in shown
    assert "alexnet" in shown
    assert "Hidden units" in command("--help", "model=perceptron").stdout
    assert "Hidden units" in command("--help", "model.units").stdout
    refused = command("model=perceptron", "model.units=3")
    assert (refused.returncode, refused.stderr) == (2, "mprun: model.units=3: must be even\n")
    assert "perceptron" in command("--info", "config", "model=perceptron").stdout
    assert (done := command(*RUN, "precision=amp")).returncode == 0, done.stderr
    assert record_of(tmp_path / "run")["status"] == "done"


@pytest.mark.slow
def test_an_installed_package_adds_an_optimizer_a_scaler_and_a_mode(command, tmp_path):
    own = {"optim": "nadam", "scaler": "power", "precision": "bits"}
    for group, name in own.items():
        assert re.search(rf"    {name} .*(Nesterov|stranger)", command("--help", group).stdout)
    assert "log2 of the loss scale (power)" in command("--help", "scaler").stdout
    assert "of optim  adam, adamw, muon, nadam" in command("--help", "optim.betas").stdout
    assert command("--help", "precision.bits").stdout.startswith("precision.bits\n  Bits of")
    chosen = [f"{group}={name}" for group, name in own.items()]
    others = "optim=sgd or optim=rmsprop or optim=rmsprop_tensorflow or optim=muon"
    for word, told in (
        ("optim.momentum=0.9", f"nadam has no such setting; {others} has it"),
        ("optim.eps=null", "nadam needs a number >= 0 (number added to the denominator)"),
        ("scaler.exponent=99", "must be >= 0 and <= 24 (log2 of the loss scale)"),
        ("precision.bits=8", "must be one of 16, 32"),
    ):
        refused = command(*chosen, word)
        assert (refused.returncode, refused.stderr) == (2, f"mprun: {word}: {told}\n")
    words = [*RUN, *chosen, "train.checkpoint_every=2", "optim.momentum_decay=0.01"]
    assert (done := command(*words)).returncode == 0, done.stderr
    record = record_of(tmp_path / "run")
    assert record["status"] == "done" and record["precision"]["mode"] == "bits"
    assert record["precision"]["effective_dtypes"]["model"]["parameters"].keys() == {"bfloat16"}
    assert record["config"]["optim"]["momentum_decay"] == 0.01
    assert command("resume=run", "train.steps=3").returncode == 0
    scales = {row.get("loss_scale") for row in rows_of(tmp_path / "run")}
    assert scales - {None} == {1024.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("optim", "defaults: [/schema/optim/nadam@_here_]\nname: sgd"),
        ("optim", "name: nadam"),
        ("precision", "defaults: [/schema/precision/bits@_here_]"),
    ],
)
def test_an_option_with_the_schema_of_another_is_refused(command, tmp_path, group, text):
    other = tmp_path / "own" / group / "other.yaml"
    other.parent.mkdir(parents=True)
    other.write_text(text, encoding="utf-8")
    done = command("--config-dir", "own", f"{group}=other")
    assert done.returncode == 2 and "not a value to set" in done.stderr


def test_a_package_that_cannot_be_imported_is_named(command, tmp_path):
    (tmp_path / "site" / FILES[0]).write_text("import nothing_of_this_name", encoding="utf-8")
    done = command("--help", "model")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "entry point mprun.components perceptrons: ModuleNotFoundError" in done.stderr


def builders(component) -> list[str]:
    """All that a component names as `module:attribute`."""
    builder = component.builder
    if isinstance(builder, str):
        return [builder] if builder else []
    return list(builder.values() if isinstance(builder, dict) else builder)


def named_in(path: Path) -> set[str]:
    """Words that are a whole text in the code, and names of classes that are used there."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    names = {node.id for node in nodes if isinstance(node, ast.Name) and node.id[0].isupper()}
    return {text for text in texts if isinstance(text, str)} | names


@pytest.mark.slow
def test_every_component_is_named_in_at_most_three_files_outside_of_its_own():
    """Its own are its chapter and what builds it. Rows of the paper are called like their networks:
    all of them are one place. Text is a family and a type too, and failures are classified.
    """
    root = Path(mprun.__file__).parent
    words = {path.relative_to(root): named_in(path) for path in root.rglob("*.py")}
    for component in (*NETWORKS.values(), *SOURCES.values(), *TASKS.values()):
        if component.name in ("text", "classification"):
            continue
        config = getattr(component, "config", None)
        called = {component.name, config.__name__} if config else {component.name}
        modules = [text.partition(":")[0] for text in builders(component)]
        own = {Path(*module.split(".")[1:]).with_suffix(".py") for module in modules}
        found = {path for path, inside in words.items() if called & inside} - own
        chapters = {path for path in found if path.parent.name == "components"}
        rows = {path for path in found if "paper" in path.parts or path.stem == "published"}
        outside = found - chapters - rows
        assert len(outside) + bool(rows) <= 3, (component.name, outside)


def test_whoever_only_reads_records_knows_their_tasks():
    program = "from mprun.comparison.findings import is_gan; assert is_gan({'model.name': 'dcgan'})"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_what_builds_a_component_is_there():
    registered = [one for table, _ in COMPONENTS.values() for one in table.values()]
    for component in (*registered, *TASKS.values()):
        assert builders(component) or component.own
        assert all(callable(loaded(text)) for text in builders(component)), component.name


def test_no_builder_has_another_default_than_its_schema():
    """A size that comes from the data has no default in the schema."""
    compared = 0
    for component in (*NETWORKS.values(), *SOURCES.values()):
        config = component.config()
        own = {*config.__dataclass_fields__} - {*getattr(component, "needs", ())}
        for text in builders(component):
            for name, default in settings_of(loaded(text)).items():
                if name in own and default is not inspect.Parameter.empty:
                    assert default == getattr(config, name), (text, name)
                    compared += 1
    assert compared > 20


@pytest.mark.parametrize(("group", "components"), [("model", NETWORKS), ("data", SOURCES)])
def test_an_option_states_what_differs_from_its_schema(group, components):
    for option, name in named(group).items():
        text = option_files(group)[option].read_text(encoding="utf-8")
        values = yaml.safe_load(text)
        del values["defaults"]
        own = asdict(components[name].config())
        repeated = [key for key, value in values.items() if own[key] == value]
        assert not repeated or "# Published sizes" in text, (option, repeated)


def test_an_options_object_is_made_of_the_keys_of_its_fields():
    """One of which a required field is no key is left to the caller."""

    def make(sequence_length, serving: Serving, windows: Windows, geometry: Augmentation): ...

    config = SOURCES["text"].config(sequence_length=7, rotate=False)
    assert arguments_of(make, config, seed=3, device="cpu") == {
        "sequence_length": 7,
        "serving": Serving(batch_size=32, seed=3, device=torch.device("cpu")),
        "windows": Windows(sequence_length=7, rotate=False),
    }
