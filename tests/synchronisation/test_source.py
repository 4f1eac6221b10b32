"""Read from the source: no function of the step path reads a tensor on the host."""

import ast
from pathlib import Path

import pytest

import mprun

from ..tables import with_extensions

ROOT = Path(mprun.__file__).parent
METHODS = {"item", "cpu", "tolist", "numpy", "is_nonzero", "nonzero", "equal", "synchronize"}
NAMES = {"bool", "float", "int"}
# Of these files every function but those named here, which run before the first step, in an
# evaluation, for a checkpoint, or when a user asks.
AROUND = {"__init__", "__post_init__", "__repr__", "state_dict", "load_state_dict"}
AROUND |= {"evaluate", "evaluating", "samples", "description"}
PRECISION = "autocast casting emulated_recurrent emulation forward_context update"
WHOLE = {
    **{f"tasks/{name}.py": set() for name in ("learner", "supervised", "task")},
    "tasks/gan.py": {"_distance_to_held_out"},
    **{f"models/{name}.py": set() for name in ("classifiers", "dcgan", "gpt", "lstm")},
    # The rate reads the count of skipped updates where it is on the host.
    "execution/step_runner.py": {"apply"},
    **{f"precision/{name}.py": set() for name in PRECISION.split()},
    # Where the state is made.
    "precision/loss_scale.py": {"_add"},
    "prepared/border.py": set(),
    "prepared/nodes.py": {"leaves"},  # of the graph
    "prepared/passes.py": set(),
    # A closure runs again until its gradients are finite.
    "prepared/scaling.py": {"repeated", "finite"},
    # Where the host alone can skip.
    "precision/torch_update.py": {"skipping"},
}
WHOLE = with_extensions("WHOLE", WHOLE)
# Of these files the functions named here.
PARTS = {
    "recording/metric_buffer.py": {"add", "close", "restart_clock", "sound"},
    "record/async_copy.py": {"send"},
    "data/loader.py": {"batch", "_cuda_batch", "_copy"},
    "data/image_store.py": {"train_batch", "_float"},
    "data/source.py": {"indices", "at_least"},
    "data/token_streams.py": {"train_batch", "_chunk"},
    "numerics/failure.py": {"keep_if", "_pause"},
    "numerics/replay.py": {"take_if", "_fits"},
    "numerics/state.py": {"all_finite"},
}
PARTS = with_extensions("PARTS", PARTS)


def host_reads(source: str, wanted) -> list[tuple[str, str]]:
    """(function, call) of each call that could read a tensor, in the functions that `wanted` names.

    Of constants int(), float() and bool() read nothing.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and wanted(node.name):
            for call in (inner for inner in ast.walk(node) if isinstance(inner, ast.Call)):
                if isinstance(call.func, ast.Attribute) and call.func.attr in METHODS:
                    found.append((node.name, f".{call.func.attr}("))
                constant = all(isinstance(argument, ast.Constant) for argument in call.args)
                if isinstance(call.func, ast.Name) and call.func.id in NAMES and not constant:
                    found.append((node.name, f"{call.func.id}("))
    return found


@pytest.mark.parametrize("file", WHOLE)
def test_no_function_but_those_around_a_step(file):
    around = AROUND | WHOLE[file]
    source = (ROOT / file).read_text(encoding="utf-8")
    assert host_reads(source, lambda name: name not in around) == []


def reads_of(file: str, names: set[str]) -> list[tuple[str, str]]:
    """What `host_reads` finds in functions of a file, which has them all."""
    source = (ROOT / file).read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(source))
    assert names <= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return host_reads(source, lambda name: name in names)


@pytest.mark.parametrize("file", PARTS)
def test_no_function_of_these(file):
    assert reads_of(file, PARTS[file]) == []


def test_the_rate_reads_a_count_of_the_host_alone():
    source = (ROOT / "execution/step_runner.py").read_text(encoding="utf-8")
    assert host_reads(source, lambda name: name in ("apply", "at")) == [("apply", "int(")]


def test_the_loop_itself_reads_nothing():
    """Between two records: `train` and what it does in every step, without what these call."""
    parts = {"train", "due", "advance", "after_step", "log"}
    assert reads_of("training/loop.py", parts) == []


@pytest.mark.parametrize(
    "call", ["x.item()", "x.sum().cpu()", "x.tolist()", "bool(x > 0)", "float(x)", "int(a.b)"]
)
def test_the_scan_sees_such_calls(call):
    source = f"class A:\n    def step(self, x):\n        y = [1 for _ in x if {call}]\n"
    assert len(host_reads(source, lambda name: name == "step")) == 1
    assert host_reads(source, lambda name: name == "other") == []
