"""The documentation site: Sphinx reads Markdown (MyST), executes notebooks; scripts/docs builds it.

Nothing is fetched: no other project's inventory, no font, no script of another host. What the
program knows of itself (keys, command line, modes, scalers) is written where a page says
`<!-- generated: NAME -->`, by the function of that name in generated.py.
"""

import inspect
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import generated  # noqa: E402

import mprun  # noqa: E402

project = "mprun"
author = "The mprun authors"
version = release = mprun.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
copybutton_selector = "div.highlight-bash pre, div.highlight-python pre, div.highlight-ipython3 pre"
exclude_patterns = ["_build", "examples"]
html_theme = "furo"
html_title = f"mprun {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = html_show_copyright = False
html_copy_source = False

highlight_language = "text"  # of a block that names none
myst_heading_anchors = 3
# Notebooks are executed by the build; a cell that fails is an error.
nb_execution_mode = "force"
nb_execution_raise_on_error = nb_execution_in_temp = nb_merge_streams = True
nb_execution_timeout = 600
nb_output_stderr = "remove"
myst_enable_extensions = ["deflist"]

default_role = "code"  # `name` in a docstring
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
# `init_scale, min_scale: text` is one entry of several names.
napoleon_use_param = napoleon_use_ivar = False

_GENERATED = re.compile(r"<!-- generated: (\w+) -->")
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"((?:\w+)(?:, \w+)*): ")


def write_generated(app, name, source):
    """Write what a page wants generated, and divide each console block."""
    source[0] = _GENERATED.sub(lambda found: getattr(generated, found[1])(), source[0])
    source[0] = _CONSOLE.sub(_divided, source[0])


def _divided(console):
    """Return a block for each command, which can be copied, and one for what it printed."""
    written = []
    for line in console[1].splitlines():
        language = "bash" if line.startswith("$ ") else "text"
        if not written or written[-1][0] != language:
            written.append((language, []))
        written[-1][1].append(line.removeprefix("$ "))
    return "\n\n".join("\n".join((f"```{own}", *lines, "```")) for own, lines in written)


def name_parameters(app, what, name, obj, options, lines):
    """`name: text` of a parameter or field, in a paragraph of its own: a list of parameters.

    Docstrings of data classes and of short functions say so without a heading.
    """
    headings = {"Args:", "Attributes:"} & {line.strip() for line in lines}
    if headings or what not in ("class", "function", "method"):
        return
    known = set(getattr(obj, "__dataclass_fields__", ()))
    try:
        known |= set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):  # no signature of its own
        return
    written, inside = [], False
    for line in lines:
        entry = _ENTRY.match(line)
        begins = entry is not None and set(entry[1].split(", ")) <= known
        if begins and not inside:
            written += ["", "Args:"]
        if not (begins or line.startswith(" ") or not line.strip()):
            if inside:
                written.append("")
            inside = False
        inside = inside or begins
        written.append(f"    {line}" if inside and line.strip() else line)
    lines[:] = written


def as_text(app, what, name, obj, options, lines):
    """Docstrings are plain text with `code`: stars and bars stand for themselves, indented blocks
    outside of sections (`Args:`) are code."""
    written, section, code = [], False, False
    for number, line in enumerate(lines):
        indented, after = line.startswith(" "), "".join(lines[number + 1 : number + 2])
        if line and not indented:
            section, code = line.endswith(":") and after.startswith(" "), False
        if indented and not section and not code and not "".join(lines[number - 1 : number]):
            written += ["::", ""]
            code = True
        written.append(line if code else _escaped(line))
    lines[:] = written


def _escaped(line):
    parts = re.split(r"(`+[^`]*`+)", line)
    parts[::2] = [re.sub(r"([*|])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def setup(app):
    app.connect("source-read", write_generated)
    # Before napoleon reads the sections.
    app.connect("autodoc-process-docstring", name_parameters, priority=100)
    app.connect("autodoc-process-docstring", as_text, priority=200)
