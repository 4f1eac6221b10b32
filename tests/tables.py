"""Tables of the core's tests, to which the tests of each extension add what is the extension's."""

from importlib import import_module
from pathlib import Path


def with_extensions(name, own, file="cases"):
    """A new table: `own` and the table `name` of each tests/extensions/*/cases.py that has one."""
    own = own.copy()
    for path in sorted(Path(__file__).parent.glob(f"extensions/*/{file}.py")):
        module = import_module(f".extensions.{path.parent.name}.{file}", __package__)
        more = getattr(module, name, type(own)())
        own = own | more if isinstance(own, dict) else own + more
    return own
