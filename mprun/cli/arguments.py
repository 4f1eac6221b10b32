"""One parser for every verb: argparse, with one line and exit code 2 for its errors.

Hydra's overrides (key=value) may be anywhere between the options.
"""

import argparse
import glob
import re
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import NoReturn

from mprun.errors import BadInput
from mprun.record.console import columns
from mprun.record.layout import hanging
from mprun.spelling import became, did_you_mean, key_called, meant, must_be, nearest


class _Page(argparse.HelpFormatter):
    """A help page as wide as the terminal, at most 80 columns."""

    def __init__(self, prog: str):
        super().__init__(prog, width=columns())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return filled(text, width)


def filled(text: str, width: int | None = None) -> str:
    """Fill paragraphs to `width` columns (None: a help page's); indented lines stay lines.

    The rest of an indented line goes below its last column, which begins after two blanks.
    """
    width = width or columns()
    found: list[str] = []
    for line in text.splitlines():
        joins = found and found[-1] and not line.startswith(" ") and not found[-1].startswith(" ")
        if line and joins:
            found[-1] += f" {line}"
        else:
            found.append(line)
    return "\n".join(_wrapped(line, width) for line in found)


def _wrapped(line: str, width: int) -> str:
    indent = len(line) - len(line.lstrip())
    gap = line.rfind("  ", indent)  # before the last column
    below = gap + 2 if indent <= gap < width - 20 else indent + 2 * (indent > 0)
    return hanging(line, width, below)


class Arguments(argparse.ArgumentParser):
    """The command line of `mprun VERB`.

    Args:
        verb: "" for mprun itself.
        what: what the verb does, above its options; in the form of `filled`.
        more: examples and exit codes, below them.
        overrides: whether key=value is allowed, as `overrides` of the result.
        verbs: for mprun itself: words that may replace key=value.
    """

    def __init__(
        self,
        verb: str,
        what: str,
        more: str = "",
        *,
        overrides: bool = False,
        verbs: Collection[str] = (),
    ):
        super().__init__(
            prog=f"mprun {verb}".strip(),
            description=what,
            epilog=more,
            allow_abbrev=False,
            formatter_class=_Page,
        )
        self.verb, self.takes_overrides, self.verbs = verb, overrides, verbs
        if overrides:
            self.add_argument(
                "overrides",
                nargs="*",
                metavar="KEY=VALUE",
                help="KEY=VALUE settings of the configuration, as for a run",
            )

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Return the values of the options; BadInput, or SystemExit after `--help`."""
        found, unknown = self.parse_known_intermixed_args(self._with_values(arguments))
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            longest = [a.option_strings[-1] for a in self._actions if a.option_strings]
            allowed = f" (allowed: {', '.join(longest)})" if self.verb else ""
            if now := became(f"{self.verb} {unknown[0].partition('=')[0]}"):
                self.error(f"{unknown[0]}: unknown option; {now}")
            hint = self._as_override(arguments, unknown[0]) or nearest(unknown[0], known)
            self.error(f"{unknown[0]}: unknown option{hint}{allowed}")
        for word in found.overrides if self.takes_overrides else ():
            if "=" not in word and not word.startswith("~"):
                if word in self.verbs:
                    self.error(f"'{word}': a verb comes first: mprun {word} ...")
                hint = did_you_mean(_as_option(word) or meant(word, self.verbs))
                verbs = f"a verb ({', '.join(self.verbs)})" if self.verbs else "an option"
                self.error(f"'{word}': {hint and f'{hint} It is '}neither {verbs} nor key=value")
        self._refuse_twice(found.overrides if self.takes_overrides else [])
        return found

    def _refuse_twice(self, overrides: list[str]) -> None:
        """Refuse two options of one group, of which the second would replace all keys of the first.

        Of a key the last value counts, as in Hydra: a script may append to what it was given.
        """
        given: dict[str, str] = {}
        for word in overrides:
            key, _, value = word.lstrip("+").partition("=")
            before = given.setdefault(key, value)
            if before == value or "." in key:
                continue
            from mprun.config.keys import FIELDS  # here: reading the schema takes a moment

            if key == "experiment" or any(field.startswith(f"{key}.") for field in FIELDS):
                self.error(f"{word}: {key}={before} stands before it; give {key} once")

    def _as_override(self, arguments: list[str], unknown: str) -> str:
        """Return `; did you mean 'optim.lr=0.1'?` for `--lr 0.1`, or nothing without such a key."""
        from mprun.config.keys import FIELDS  # here: reading the schema takes a moment

        flag, _, value = unknown.lstrip("-").partition("=")
        key = key_called(flag.replace("-", "_"), FIELDS) if self.takes_overrides else None
        given = value or [*arguments[arguments.index(unknown) + 1 :], "VALUE"][0]
        return f"; {did_you_mean([f'{key}={given}'])}" if key else ""

    def _with_values(self, arguments: list[str]) -> list[str]:
        """Keep options with an optional value (nargs="?") from taking a KEY=VALUE as theirs."""
        optional = {
            name: action.const
            for action in self._actions
            for name in (action.option_strings if action.nargs == "?" else ())
        }
        return [
            f"{word}={optional[word]}"
            if word in optional and ("=" in after or after.startswith("-"))
            else word
            for word, after in zip_longest(arguments, arguments[1:], fillvalue="-")
        ]

    def error(self, message: str) -> NoReturn:
        """Raise BadInput with `message`, which names the argument."""
        # argparse says "argument --out: expected one argument".
        message = message.removeprefix("argument ")
        message = re.sub("expected (one|at least one) argument", "needs a value", message)
        start = f"{self.verb}: " if self.verb else ""
        raise BadInput(f"{start}{message} (see {self.prog} --help)")


def _as_option(word: str) -> list[str]:
    """Return ["model=resnet50"] for `resnet50`: the options with this name, with their groups."""
    if len(word) > 60 or not word.isprintable():
        return []
    from mprun.config.option_files import folders  # here: reading the schema takes a moment

    found = (path for folder in folders() for path in folder.glob(f"*/{glob.escape(word)}.yaml"))
    return [f"{path.parent.name}={word}" for path in found]


def number(
    flag: str, low: float, high: float, what: str = "a number", *, whole: bool = False
) -> Callable[[str], float]:
    """Return a `type` for add_argument: a number from `low` to `high`, an int if `whole`."""

    def read(text: str) -> float:
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise BadInput(f"{flag} {text}: must be {what} from {low:g} to {high:g}")
        return value

    return read


def names(flag: str) -> Callable[[str], list[str]]:
    """Return a `type` for add_argument: names separated by commas, at least one."""

    def read(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",") if name.strip()]
        if not found:
            raise BadInput(f"{flag} {text}: needs names, separated by commas")
        return found

    return read


def known_modes(flag: str, given: Sequence[str], config_dir: str | None) -> list[str]:
    """Return the given precision modes, each once; BadInput for one without a YAML file."""
    from mprun.config.option_files import modes  # here: reading the schema takes a moment

    known = list(modes(config_dir))
    for name in given:
        if name not in known:
            raise BadInput(f"{flag} {name}: unknown mode; {must_be(name, known, 'precision')}")
    return list(dict.fromkeys(given))
