"""Change the code of functions that are loaded already, by the changes of `mutations`."""

import ast
import functools
import gc
import sys
import types
from collections import defaultdict
from pathlib import Path

import mutations


class Loaded:
    """The functions and caches of mprun in this process, which must not be frozen for `gc`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.functions: dict[str, list[types.FunctionType]] = defaultdict(list)
        self.caches = []
        for one in gc.get_objects():
            # No isinstance: it asks proxies for their class, which may warn.
            if type(one) is types.FunctionType:
                if file := in_mprun(root, one.__code__.co_filename):
                    self.functions[file].append(one)
            elif type(one) is functools._lru_cache_wrapper and one.__module__.startswith("mprun"):
                self.caches.append(one)

    def plant(self, file: str, place: int) -> bool:
        """Make one of the file's changes in this process; return whether that could be done."""
        tree = ast.parse((self.root / file).read_text())
        change = mutations.changes(tree)[place]
        change.apply()
        for cache in self.caches:
            cache.cache_clear()
        if not change.function:
            return _rebind(file, tree, change)
        name = str(self.root / file)
        codes = _codes(compile(tree, name, "exec", dont_inherit=True))
        planted = False
        for function in self.functions[file]:
            old = function.__code__
            new = codes.get((old.co_qualname, old.co_firstlineno), [])
            if len(new) == 1 and new[0].co_freevars == old.co_freevars:
                function.__code__ = new[0]
                # Of unchanged functions, too, the positions in the code may be others.
                own = old.co_qualname.replace(".<locals>", "")
                planted |= own == change.function or change.function.startswith(f"{own}.")
        return planted


@functools.cache
def in_mprun(root: Path, filename: str) -> str | None:
    """Return a module of mprun relative to the checkout; None for any other file, such as a
    template of pages, whose lines count as executed, too."""
    inside = filename.startswith(f"{root}/mprun/") and filename.endswith(".py")
    return filename[len(str(root)) + 1 :] if inside else None


def module_name(file: str) -> str:
    """Return "mprun.precision" for "mprun/precision/__init__.py"."""
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def _rebind(file: str, tree: ast.Module, change: mutations.Change) -> bool:
    """Give a name of the module its changed value wherever it was imported to."""
    module = sys.modules[module_name(file)]
    for one in tree.body:
        if not isinstance(one, ast.Assign) or not isinstance(one.targets[0], ast.Name):
            continue
        if not one.lineno <= change.line <= (one.end_lineno or one.lineno):
            continue
        name = one.targets[0].id
        old = getattr(module, name)
        new = eval(compile(ast.Expression(one.value), file, "eval"), vars(module))
        if isinstance(old, (types.FunctionType, type)) or new == old:
            return False
        for other in list(sys.modules.values()):
            if getattr(other, "__dict__", {}).get(name) is old:
                setattr(other, name, new)
        return True
    return False


def _codes(code: types.CodeType) -> dict[tuple[str, int], list[types.CodeType]]:
    """Return the code of every function below `code`, by qualified name and first line."""
    found: dict[tuple[str, int], list[types.CodeType]] = {}
    waiting = [code]
    while waiting:
        inner = [one for one in waiting.pop().co_consts if isinstance(one, types.CodeType)]
        for one in inner:
            found.setdefault((one.co_qualname, one.co_firstlineno), []).append(one)
        waiting += inner
    return found
