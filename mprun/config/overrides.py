"""The text of command-line overrides: parse it, and refuse what no configuration can take."""

import math
import re
import shlex
from collections.abc import Iterable
from decimal import Decimal
from functools import lru_cache
from typing import get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString, RangeSweep, Sweep

from mprun.config.keys import FIELDS, PATHS, wanted
from mprun.config.registry import COMPONENTS
from mprun.errors import BadInput, shortened
from mprun.record.seed_plan import SEED_WORDS

# The mapping from module-name patterns to dtypes: its keys hold dots and stars.
MAPPING = "precision.overrides"
OPTIONS = ("data.options", "model.options")  # arguments of the user's functions
# Mappings whose keys no schema knows.
FREE_MAPPINGS = (MAPPING, *OPTIONS)
# Choosing a group's option sets them.
_CHOSEN_BY_GROUP = (*(f"{group}.name" for group in COMPONENTS), "scaler.kind")
_SCIENTIFIC = re.compile(r"(?<![^,(])\d+(?:\.\d+)?[eE][+]?\d+(?![^,)])")


def parse_overrides(overrides: Iterable[str], *, sweep: bool = False) -> list[Override]:
    """Parse each override as Hydra does; BadInput names the one that is not `key=value`.

    `precision.overrides.layer4.*=fp32` becomes an entry of the mapping `precision.overrides`, and
    `train.steps=1e3` an integer. A path is taken as it is typed.

    sweep: whether a comma separates paths, as it separates other values.
    """
    parsed = []
    for text in overrides:
        try:
            override = _parse(_path_quoted(_entry_as_mapping(_whole_as_int(text)), sweep))
        except OSError:  # for example, no descriptor left for a part of the parser
            raise
        # Other errors too: int() refuses 4,300 digits, deep nesting exhausts the stack.
        except Exception:
            override = _as_text(text)
        _refuse(override, text)
        parsed.append(override)
    return parsed


def _as_text(text: str) -> Override:
    """Return an override that Hydra's grammar refuses with its value as text, if it may be text.

    The schema then takes it, or says what it must be. No schema knows an argument of the user's
    function: there it needs quotes, since a list without its bracket is no text.
    """
    key, equals, value = text.partition("=")
    name = key.lstrip("+~")
    try:
        quoted = _parse(assignment(key, value))
    except Exception:  # the key is wrong, or nothing can be typed so
        quoted = None
    if quoted is None or not equals:
        form = "a key has letters, digits, _, - and dots" if equals and name else "no key or no ="
        raise BadInput(f"'{printable(text)}': not of the form key=value ({form})") from None
    if mapping_of(name) == MAPPING:
        raise BadInput(f"{printable(text)}: must map module-name patterns to dtypes") from None
    if "${" not in value and name in FIELDS and name not in COMPONENTS and str not in _kinds(name):
        raise BadInput(f"{printable(text)}: must be {wanted(name)}") from None
    if mapping_of(name) is None:
        return quoted
    needs = f"as text it needs quotes: {in_shell([assignment(key, value)])}"
    raise BadInput(f"{printable(text)}: must be a number, list or mapping; {needs}") from None


_IN_QUOTES = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_BETWEEN_COMMAS = re.compile(rf"(?:^|(?<=,))(?:(?:{_IN_QUOTES})(?=,|$)|[^,]*)", re.DOTALL)
_SWEEP_FUNCTION = re.compile(r"(?:choice|glob|range|interval|sort|shuffle|tag)\(.*\)", re.DOTALL)


def _path_quoted(text: str, sweep: bool) -> str:
    """Quote a path, so that Hydra takes it as it is; null and a path in quotes stay.

    In a sweep a value that is a function of Hydra's, such as `choice(/a,/b)`, stays, too.
    """
    key, equals, value = text.partition("=")
    if not equals or key.lstrip("+") not in PATHS or (sweep and _SWEEP_FUNCTION.fullmatch(value)):
        return text
    paths = _BETWEEN_COMMAS.findall(value) if sweep else [value]
    return f"{key}=" + ",".join(
        path
        if path in ("", "null") or re.fullmatch(_IN_QUOTES, path, re.DOTALL)
        else QuotedString(path, Quote.single).with_quotes()
        for path in paths
    )


def as_hydra_takes(parsed: Iterable[Override]) -> list[Override]:
    """Return the overrides for Hydra: an entry of a free-form mapping needs `++`."""
    return [
        _parse(f"++{line_of(o).lstrip('+')}") if mapping_of(o.key_or_group) else o for o in parsed
    ]


@lru_cache(1024)  # a millisecond each, and a sweep's runs have most of them in common
def _parse(text: str) -> Override:
    [override] = OverridesParser.create().parse_overrides([text])
    return override


def line_of(override: Override) -> str:
    """Return an override as it was typed; Hydra's type allows None."""
    return override.input_line or ""


def assignment(key: str, value: object) -> str:
    """Return the override `key=value`, which parses to just this value."""
    return f"{key}={_in_grammar(value)}"


def _in_grammar(value: object) -> str:
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z_/][\w./:@%+-]*", value, re.ASCII)
        special = value.lower() in ("null", "true", "false", "nan", "inf")
        quoted: str = QuotedString(value, Quote.single).with_quotes()
        return value if plain and not special else quoted
    if isinstance(value, list):
        return f"[{','.join(map(_in_grammar, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_in_grammar(k)}:{_in_grammar(v)}' for k, v in value.items())}}}"
    return "null" if value is None else str(value).lower()


def in_shell(overrides: Iterable[str]) -> str:
    """Return overrides as words of a shell: it gets single quotes, and values double ones."""
    return shlex.join(o if set(o) & set('"\\') else o.replace("'", '"') for o in overrides)


def mapping_of(key: str) -> str | None:
    """Return the mapping that `key` names or lies in, None for a key of the schema."""
    return next((m for m in FREE_MAPPINGS if key == m or key.startswith(f"{m}.")), None)


def without(overrides: Iterable[str], *left_out: str) -> list[str]:
    """Return the overrides whose key, and whose key's group, is not in `left_out`."""
    keys = ((text, text.lstrip("+~").partition("=")[0]) for text in overrides)
    return [text for text, key in keys if not {key, key.partition(".")[0]} & set(left_out)]


def split_launcher(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return (overrides of Hydra's launcher, which only a sweep has; all the others)."""
    given = list(overrides)
    launcher = [text for text in given if _is_of_launcher(text.lstrip("+~").partition("=")[0])]
    return launcher, [text for text in given if text not in launcher]


def split_seed_words(overrides: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return (the words of SEED_WORDS that are given -> value; all the other overrides)."""
    given: dict[str, str] = {}
    others = []
    for text in overrides:
        key, equals, value = text.lstrip("+").partition("=")
        if equals and key in SEED_WORDS:
            given[key] = value
        else:
            others.append(text)
    return given, others


MOST_RUNS = 10_000  # of a sweep


def sweep_values(override: Override, options: list[str]) -> list[str]:
    """Return the single overrides `key=value` of one swept override, in order.

    options: the options of its group, from which `glob` chooses.
    """
    value = override.value()
    if isinstance(value, RangeSweep):
        _check_range(override, *(Decimal(n or 0) for n in (value.start, value.stop, value.step)))
    if isinstance(value, Glob):
        values = value.filter(options)
    elif override.is_discrete_sweep():
        values = list(override.sweep_string_iterator())
    else:
        must = "must be a list, range(), choice() or glob() to sweep over"
        raise BadInput(f"{override.input_line}: {must}")
    if not values:
        raise BadInput(f"{override.input_line}: needs at least one value to sweep over")
    key = line_of(override).partition("=")[0]
    return [f"{key}={value}" for value in values]


def _check_range(override: Override, start: Decimal, stop: Decimal, step: Decimal) -> None:
    """Refuse a range without an end, or with too many values, before any of them is made."""
    if not step or not (start.is_finite() and stop.is_finite() and step.is_finite()):
        raise BadInput(
            f"{override.input_line}: the range needs finite ends and a step other than 0"
        )
    if (count := math.ceil((stop - start) / step)) > MOST_RUNS:
        raise BadInput(
            f"{override.input_line}: {count:,} values, one run each; must be at most {MOST_RUNS:,} "
            "in one sweep"
        )


def printable(value: object) -> str:
    """Return `value` on one short line, whatever it holds."""
    text = "".join(c if c.isprintable() else "?" for c in str(value))
    return text if len(text) <= 80 else shortened(text, 80)


def _is_of_launcher(key: str) -> bool:
    return re.split("[.@]", key)[0] == "hydra/launcher" or key.startswith("hydra.launcher.")


def _whole_as_int(text: str) -> str:
    """Rewrite 1e3, a float to Hydra, as an integer if the key only takes integers."""
    key, _, values = text.partition("=")
    if int not in (kinds := _kinds(key)) or float in kinds:
        return text

    def whole(match: re.Match[str]) -> str:
        value = float(match[0])
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else match[0]

    return f"{key}={re.sub(_SCIENTIFIC, whole, values)}"


def _kinds(key: str) -> set[object]:
    """Return the types that the fields of a key name: {float, NoneType} and what they are in."""
    return {kind for field in FIELDS.get(key, ()) for kind in (field.type, *get_args(field.type))}


def _entry_as_mapping(text: str) -> str:
    if not text.startswith(MAPPING + "."):
        return text
    pattern, _, dtypes = text.removeprefix(MAPPING + ".").partition("=")
    # In a mapping's key Hydra's grammar only takes these characters after a backslash.
    key = re.sub(r"([\[\](){}:=, ])", r"\\\1", pattern)
    if not key or not dtypes:
        return text
    return f"{MAPPING}=" + ",".join(f"{{{key}:{dtype}}}" for dtype in dtypes.split(","))


def _holds_function(value: object) -> bool:
    """Return whether a list or a mapping holds a function of Hydra's grammar."""
    parts = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return any(isinstance(part, Glob | Sweep) or _holds_function(part) for part in parts)


# Why keys of Hydra's own are refused, and what is used instead; by how they begin.
_PLACES_OUTPUT = "mprun places its own output; use name=, output_root= or output_dir="
_HYDRA = (
    (("run", "sweep.", "output_subdir", "job.name", "runtime.output"), _PLACES_OUTPUT),
    ("searchpath", "option files are mprun's and those of one folder; use --config-dir DIR"),
    (("verbose", "job_logging", "hydra_logging"), "mprun prints without Hydra's logs; use -v"),
    (("mode", "sweeper"), "mprun sweeps by itself; use -m with lists, range(), choice(), glob()"),
    ("job.env_set", "mprun sets no variables; set them in the shell"),
    ("job.chdir", "mprun stays in the folder that it was started in; use output_dir="),
)
_NO_HYDRA = "Hydra only composes the configuration here; none of its own keys has an effect"


def _refuse(override: Override, text: str) -> None:
    key = override.key_or_group
    if "\0" in text:
        raise BadInput(f"{printable(text)}: a value must not contain a zero byte")
    if "${" in text:
        # It could put an environment variable into the record, or one group in place of another.
        raise BadInput(f"{printable(text)}: ${{...}} is for configuration files; write the value")
    if not key:
        raise BadInput(f"'{printable(text)}': not of the form key=value (no key)")
    if _is_of_launcher(key):
        raise BadInput(f"{key}: only a sweep (-m) has a launcher")
    if key in SEED_WORDS:
        raise BadInput(f"{printable(text)}: only a sweep (-m) adds seeds")
    if re.split(r"[./]", key)[0] == "hydra":
        name = key.replace("/", ".").removeprefix("hydra.")
        why = next((why for names, why in _HYDRA if name.startswith(names)), _NO_HYDRA)
        raise BadInput(f"{printable(key)}: {why}")
    if override.is_delete():
        raise BadInput(f"{printable(text)}: a key cannot be deleted; set it to another value")
    if key in _CHOSEN_BY_GROUP:
        group = key.partition(".")[0]
        raise BadInput(f"{printable(text)}: not a value to set; choose {group}=OPTION")
    if _holds_function(override.value()):
        whole = "choice(), range() and glob() stand for a whole value"
        raise BadInput(f"{printable(text)}: {whole}")
    if override.package is not None:
        raise BadInput(f"{printable(text)}: @PACKAGE is not supported; write {key}=OPTION")
