"""Every import of an own name resolves, in functions that no test here can call too."""

import ast
import symtable
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A script is begun in its folder, so its neighbours are modules of their own there.
PLACES = (ROOT, ROOT / "benchmarks", ROOT / "scripts")


@cache
def path_of(module: str) -> Path | None:
    """The file or folder of an own module; None: it is a library's, or is not there."""
    for place in PLACES:
        path = place.joinpath(*module.split("."))
        for own in (path.with_suffix(".py"), path / "__init__.py", path):
            if own.exists():
                return own
    return None


@cache
def names_in(path: Path) -> set[str]:
    """Names that a module binds; a folder's are its modules."""
    folder = path if path.is_dir() else path.parent if path.name == "__init__.py" else None
    names = {one.stem for one in folder.iterdir()} if folder else set()
    if path.is_dir():
        return names
    symbols = symtable.symtable(path.read_text(), str(path), "exec").get_symbols()
    return names | {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


def imports(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """Line, module and name of each import."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, module, alias.name) for alias in node.names)


def resolves(module: str, name: str | None) -> bool:
    if path_of(module.partition(".")[0]) is None:
        return True
    own = path_of(module)
    return own is not None and (name is None or bool({name, "__getattr__"} & names_in(own)))


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["benchmarks", "scripts", "tests"])
def test_what_is_imported_is_there(folder):
    paths = (ROOT / folder).rglob("*.py")
    found = ((path.relative_to(ROOT), *one) for path in paths for one in imports(path))
    assert [one for one in found if not resolves(*one[2:])] == []
