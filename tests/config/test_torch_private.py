"""Private names of torch: one module spells them, and the torch that is installed has each."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import mprun
from mprun.torch_private import said_by_a_compiler

ROOT = Path(mprun.__file__).parent
OWN = "torch_private.py"
_WEIGHT = nn.Parameter(torch.zeros(1))
# Objects of torch whose attributes mprun could read.
OBJECTS = (
    *(torch, torch.autograd, torch.autograd.Variable, torch.cpu, torch.cuda, torch.library),
    *(torch.overrides, torch._C, _WEIGHT, _WEIGHT.untyped_storage(), torch.ops.aten.add.Tensor),
    *(nn.Module(), nn.LSTM(1, 1), nn.BatchNorm1d(1), nn.parallel.DistributedDataParallel),
    *(torch.optim.Adam([_WEIGHT], fused=True), torch.amp.GradScaler("cpu"), torch.Generator()),
    *(torch.utils.data.Sampler, DataLoader([0]), torch.distributed.ProcessGroup),
)


def is_private(name):
    return name.startswith("_") and name.strip("_") != "" and not name.startswith("__")


NAMES = {name for one in OBJECTS for name in dir(one) if is_private(name)}
# Attributes that code reaches by their names; of operators the names are no secret.
WORDS = {
    node.value
    for node in ast.walk(ast.parse((ROOT / OWN).read_text(encoding="utf-8")))
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value)
}


def uses(source):
    """Yield (line, text) wherever `source` spells a private name of torch."""
    nodes = [*ast.walk(ast.parse(source))]
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    stored = [n for n in nodes if isinstance(getattr(n, "ctx", None), ast.Store)]
    defined |= {n.attr for n in stored if isinstance(n, ast.Attribute)}
    defined |= {n.id for n in stored if isinstance(n, ast.Name)}
    for node in nodes:
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names):
                found = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute(value=owner, attr=attr) if is_private(attr):
                of = ast.unparse(owner)
                if of.startswith(("torch.ops.", "aten")) or (
                    attr in defined and (of in ("self", "cls") or of in defined)
                ):
                    continue
                found = [f"torch.{of}.{attr}"] if attr in NAMES else [f"{of}.{attr}"]
            case ast.Constant(value=str(word)) if " " not in word:
                found = [f"torch.{word}"] if word in WORDS else [word]
            case ast.Call(func=ast.Name("getattr"), args=[owner, ast.JoinedStr([first, *_]), *_]):
                start = first.value if isinstance(first, ast.Constant) else ""
                of = ast.unparse(owner)
                found = [] if of.startswith("torch.ops.") else [f"{of}.{start}"]
            case _:
                continue
        for name in found:
            if name.startswith("torch.") and any(map(is_private, name.split("."))):
                yield node.lineno, ast.unparse(node)


@pytest.mark.slow
def test_one_module_spells_private_names():
    for path in {*ROOT.rglob("*.py")} - {ROOT / OWN}:
        assert [*uses(path.read_text(encoding="utf-8"))] == [], path


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree",
        "from torch.utils._pytree import tree_map",
        "torch._foreach_add_(a, 1)",
        "torch._C.DisableTorchFunction()",
        "x.grad._version",
        "func._schema.name",
        "self._parameters",
        "module._forward_hooks",
        'vars(module)["_flat_weights"]',
        'getattr(torch, f"_fused_{rule}_")',
        'import_module("torch._dynamo")',
    ],
)
def test_the_scan_sees_private_names(source):
    assert len(list(uses(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        'torch.ops.aten._to_copy.default; table = {"_to_copy", "_foreach_add_"}',
        'getattr(torch.ops.aten, f"_{packet}")',
        "row._replace(a=1)._asdict(); os._exit(0)",
        "class A:\n    def _modules(self): return self._modules()",
        '"""As torch._scaled_mm does it."""',
    ],
)
def test_the_scan_leaves_operators_and_own_names(source):
    assert list(uses(source)) == []


@pytest.mark.slow
def test_this_torch_has_every_attribute_that_is_a_word():
    """A function that is gone fails at import: these would be missed in silence."""
    from torch._dynamo.eval_frame import OptimizedModule
    from torch._inductor import list_mode_options  # noqa: F401 - `compile_options` reads it late

    compiled = torch.compile(nn.LSTM(1, 1))
    assert isinstance(compiled, OptimizedModule)
    has = {name for one in (*OBJECTS, compiled) for name in dir(one)} | {"_is_param"}
    weight = torch.zeros(1)
    weight._is_param = True
    assert isinstance(weight, nn.Parameter)
    assert WORDS <= has, WORDS - has


def raised(statement, module):
    try:
        exec(statement, {"__name__": module})
    except Exception as error:
        return error


def test_what_a_compiler_said_is_one_line():
    """An assertion in code that it wrote is its own; one of the user's is not."""
    assertion = "assert 256 == 1, 'expected stride 256==1\\nError in op: convolution_backward'"
    written = raised(assertion, "torch._inductor.codecache.cabc")
    assert said_by_a_compiler(written) == "AssertionError: expected stride 256==1"
    assert said_by_a_compiler(raised(assertion, "own_model")) is None
    assert said_by_a_compiler(raised("torch", "torch._inductor.codecache.cabc")) is None
    failed = type("BackendCompilerFailed", (RuntimeError,), {"__module__": "torch._dynamo.exc"})
    line = said_by_a_compiler(failed("backend='inductor' raised:\nOSError: no cc\n\nSet TORCH"))
    assert line == "BackendCompilerFailed: backend='inductor' raised: OSError: no cc"
