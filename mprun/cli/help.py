"""`mprun --help`, `--cfg`, `--info` and shell completion: they show options and run nothing.

Hydra is only imported when a configuration is composed.
"""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Collection
from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import Any

import yaml

from mprun.cli.arguments import filled
from mprun.config.components import COMPONENTS
from mprun.config.keys import FIELDS, Meaning, meanings, role_of
from mprun.config.option_files import conf_dir, named, option_files, values_in_files, what_it_is
from mprun.entry_points import loaded, source_of
from mprun.errors import DONE, BadInput, shortened
from mprun.record.console import columns
from mprun.record.seed_plan import SEED_WORDS
from mprun.spelling import did_you_mean, key_called, must_be, nearest, word

_TITLE = "mprun: does a network learn in lower precision what it learns in FP32?\n"
_FIRST = """\
  mprun                                     one short run on embedded data
  mprun model=resnet50 precision=amp        choose group=option, set key=value
  mprun -m precision=fp32,amp seed=0,1,2    sweep: a run each, then a table
"""
_EXAMPLES = """\
Use
  mprun                                     one short run on embedded data
  mprun model=resnet50 precision=amp        choose group=option, set key=value
  mprun -m precision=fp32,amp seed=0,1,2    sweep: one process per run; again:
                                            the missing runs
  mprun -m precision=fp32,amp until=decided max_seeds=10
                                            seeds are added until each mode is
                                            decided (mprun --help until)
    hydra/launcher=joblib|submitit_local|submitit_slurm
                                            Hydra's launcher instead of -j
    hydra.launcher.KEY=VALUE                n_jobs (joblib), timeout_min,
                                            partition, ... (submitit)
  mprun experiment=resnet50_cifar10 data.root=DIR
                                            a recipe on data on disk
                                            (mprun --help experiment)
  mprun data=custom data.factory=module:function
                                            your data, your models
                                            (mprun --help data.factory)
  mprun resume=outputs/RUN                  continue from the last checkpoint
  mprun --config-dir DIR precision=mine     your modes, scalers, ...,
                                            each from DIR/GROUP/OPTION.yaml
  mprun --help model=gpt                    the keys of an option, its values
  mprun --help optim.lr                     what a key or a group means
  mprun --cfg job model=dcgan               print the whole configuration
  mprun --info defaults model=dcgan         print the files that make it up
  eval "$(mprun -sc install=bash)"          shell completion (bash, zsh, fish)
"""
_MORE = """\
More
  mprun --help precision                    options and keys of a group
  mprun --help model=gpt                    the keys of an option, its values
  mprun --help optim.lr                     what a key means
  mprun compare --help                      what a verb does, its options
  mprun --help all                          every option, group, and key
"""
_END = """\
Exit codes: 0 done, 1 a bug, 2 bad input, 3 diverged, 4 damaged data or
checkpoint, 5 resource, 75 preempted (resumable), 130 interrupted.
Results: the `tensorboard --logdir` that a run or a sweep prints at its end.
"""
GROUPS = ("model", "data", "optim", "precision", "scaler", "train", "numerics", "experiment")
# Fields that a group's option sets; mappings take the user's entry after the key.
BY_OPTION = ("name", "kind")
_OWN_KEYS = ("model", "data")  # groups whose options have different keys
_WIDEST = 34  # columns of a key and its value, left of its meaning


def first_page(verbs: dict[str, str]) -> str:
    """Return the help page that fits a screen; verbs: verb -> `module:function`."""
    groups = [f"  {name:<12}  {_about(name)}" for name in (*GROUPS, "compare", "dist")]
    parts = [
        *(_TITLE, _FIRST, _verbs(verbs), ""),
        *(filled("\n".join(["Groups (group=option, group.key=value)", *groups])), ""),
        *(_MORE, _END),
    ]
    return "\n".join(parts)


def help_text(
    verbs: dict[str, str], parser: argparse.ArgumentParser, config_dir: str | None = None
) -> str:
    """Return all of the help; verbs: verb -> `module:function`; parser: of the options."""
    parts = [
        *(_TITLE, _EXAMPLES, _verbs(verbs), ""),
        "Options\n" + parser.format_help().partition("options:\n")[2],
        *("Groups (group=option)", *(_group(name, config_dir) for name in GROUPS), ""),
        *("Keys (key=value; --cfg job prints all of them)", *_keys(), "", _END),
    ]
    return "\n".join(parts)


def _verbs(verbs: dict[str, str]) -> str:
    does = [f"  mprun {verb:<14} {_does(verbs[verb])}" for verb in verbs]
    return filled("\n".join(["Verbs", *does]))


def _about(group: str) -> str:
    return FIELDS[group][0].metadata["doc"] if group in FIELDS else "A whole published recipe"


def _does(function: str) -> str:
    """Return what a verb does, from the first line of its module, which is not imported."""
    if (path := source_of(function)) is None:
        return "(cannot be imported)"
    with open(path, encoding="utf-8") as file:
        return file.readline().strip().strip('"').rpartition("`: ")[2].rstrip(".")


def key_help(word: str, verbs: Collection[str], config_dir: str | None = None) -> str:
    """Return the meaning of the key `word`, or the keys of the group; BadInput if it is neither."""
    if word in (*GROUPS, "compare") or any(key.startswith(f"{word}.") for key in FIELDS):
        return _keys_of(word, verbs, config_dir)
    if word in SEED_WORDS:
        rows = [f"  {name:<10} {meaning}" for name, meaning in SEED_WORDS.items()]
        return filled("\n".join(["mprun -m ... until=decided max_seeds=10", *rows])) + "\n"
    key = word if word in FIELDS else word.rpartition(".")[0]
    # An entry of a mapping: precision.overrides.fc
    if key not in FIELDS or (key != word and FIELDS[key][0].default_factory is not dict):
        called = key_called(word, FIELDS)
        hint = f"; {did_you_mean([called])}" if called else nearest(word, [*FIELDS, *verbs])
        raise BadInput(f"--help {word}: no key, group or verb has this name{hint}")
    parts = [_meaning(key, one, config_dir) for one in meanings(key)]
    return filled("\n".join([key, *parts, f"  role      {role_of(key)}"])) + "\n"


def _meaning(key: str, meaning: Meaning, config_dir: str | None) -> str:
    group, _, field = key.rpartition(".")
    files: dict[str, list[str]] = {}
    if group not in ("", *_OWN_KEYS):  # of these an option file is that of one variant
        for option, value in values_in_files(group, field, config_dir).items():
            files.setdefault("null" if value is None else str(value), []).append(option)
    in_files = [f"{value} in {', '.join(options)}" for value, options in files.items()]
    rows = {
        f"of {group}": ", ".join(meaning.variants),
        "type": meaning.kind,
        "allowed": meaning.allowed,
        "default": "; ".join([meaning.default or "(none: it must be set)", *in_files]),
    }
    lines = [f"  {name:<8}  {value}" for name, value in rows.items() if value]
    return "\n".join([f"  {meaning.doc}", *lines])


def _keys_of(group: str, verbs: Collection[str], config_dir: str | None) -> str:
    """Return the keys of a group, each with its meaning, and its options."""
    docs: dict[tuple[str, str], list[str]] = {}
    for key in FIELDS:
        if key.startswith(f"{group}."):
            for one in meanings(key):
                docs.setdefault((key, one.doc), []).extend(one.variants)
    every = set().union(*docs.values())
    several = len({tuple(of) for of in docs.values()}) > 1
    own_keys = group in _OWN_KEYS  # the page of an option has them
    longest = max((len(key) for key, _ in docs), default=0)
    lines = []
    for (key, doc), of in docs.items():
        if key.rpartition(".")[2] not in BY_OPTION and not (own_keys and set(of) != every):
            owners = f" ({', '.join(of)})" if several and of and not own_keys else ""
            lines.append(f"  {key:<{longest}}  {doc}{owners}")
    what = _about(group)
    parts = [filled("\n".join([f"{group}: {what[0].lower()}{what[1:]}", *lines]))]
    parts += [_group(group, config_dir, own_keys)] if group in GROUPS else []
    if group in GROUPS and option_files(group):
        of_one = f"{group}={next(iter(option_files(group)))}"
        parts.append(f"  mprun --help {of_one}: the keys of one, with its values")
    parts += [f"  mprun {group} --help: the verb"] if group in verbs else []
    return "\n".join([*parts, ""])


def option_help(group: str, option: str, config_dir: str | None = None) -> str:
    """Return what an option is, and the keys that it has, with its values and their meaning."""
    files = option_files(group, config_dir)
    if option not in files:
        raise BadInput(f"--help {group}={option}: {must_be(option, files, group)}")
    from mprun.config.compose import option_values

    built, values = named(group, config_dir)[option], option_values(group, option, config_dir)
    rows = [
        (f"{group}.{key}={_typed(value)}", meaning.doc)
        for key, value in values.items()
        if key not in BY_OPTION and f"{group}.{key}" in FIELDS
        for meaning in meanings(f"{group}.{key}")
        if not meaning.variants or built in meaning.variants
    ]
    longest = min(_WIDEST, max((len(start) for start, _ in rows), default=0))
    lines = [f"  {start:<{longest}}  {doc}" for start, doc in rows]
    more = f"  mprun --cfg job {group}={option}: the whole configuration"
    if rows:
        more = f"  mprun --help {group}.KEY: its type and range\n{more}"
    page = "\n".join([f"{group}={option}: {what_it_is(files[option])}", *lines])
    return f"{filled(page)}\n{more}\n"


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else word(value)


def _group(name: str, config_dir: str | None, a_line: bool = False) -> str:
    """Return the options of a group and what they are; a_line: each in one."""
    options = {one: what_it_is(path) for one, path in option_files(name, config_dir).items()}
    longest = max(map(len, options), default=0) if a_line else 22
    if a_line:
        options = {one: _start_of(text, columns() - longest - 6) for one, text in options.items()}
    lines = [f"    {option:<{longest}}  {text}" for option, text in options.items()]
    return filled("\n".join([f"  {name}", *lines]))


def _start_of(sentence: str, most: int) -> str:
    """Return the parts of a sentence that fit: whole ones, unless these say too little."""
    if len(sentence) <= most:
        return sentence
    parts = (sentence[: end.start()] for end in re.finditer(r"[,;] |(?<!=\d): | \(", sentence))
    whole = [part for part in parts if len(part) < most and part.count("(") == part.count(")")]
    if not whole or len(whole[-1]) < most // 3:
        return shortened(sentence, most)
    return f"{whole[-1].rstrip('.')}."


def _keys() -> list[str]:
    """Return every key of the schema with its choices; each group begins a new line."""
    groups: dict[str, list[str]] = {}
    for key, fields in FIELDS.items():
        group, _, name = key.rpartition(".")
        if key in GROUPS or key == "compare" or (group and name in BY_OPTION):
            continue
        choices = dict.fromkeys(str(c) for f in fields for c in f.metadata.get("choices", ()))
        text = f"{key}={'|'.join(choices)}" if 1 < len(choices) < 6 else key
        groups.setdefault(group, []).append(text)
    lines = textwrap.TextWrapper(
        columns(), initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )
    return [lines.fill("  ".join(keys)) for keys in groups.values()]


# The three shells ask `mprun -sc query=SHELL` when TAB is pressed; COMP_LINE: the line up to there.
# If nothing is printed they offer files.
_SCRIPTS = {
    "bash": """\
_mprun() {
  local IFS=$'\\n' line=${COMP_LINE:0:COMP_POINT} word start
  COMPREPLY=($(COMP_LINE=$line "${COMP_WORDS[0]}" -sc query=bash 2>/dev/null))
  # bash replaces what stands behind the last of its word breaks, = among them
  word=${line##* } start=${word%"${word##*[$COMP_WORDBREAKS]}"}
  COMPREPLY=("${COMPREPLY[@]#"$start"}")
}
complete -o nospace -o bashdefault -o default -F _mprun mprun
""",
    "zsh": """\
_mprun() {
  local -a found
  found=(${(f)"$(COMP_LINE="${words[1,CURRENT-1]} $PREFIX" $words[1] -sc query=zsh 2>/dev/null)"})
  if (( $#found )); then
    compadd -Q -S '' -- ${(M)found:#*[=.]}
    compadd -Q -- ${found:#*[=.]}
  else
    compset -P '*='
    _files
  fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u }
compdef _mprun mprun
""",
    "fish": """\
function __mprun
  set -l found (COMP_LINE=(commandline -cp) mprun -sc query=fish 2>/dev/null)
  if test (count $found) -gt 0
    printf '%s\\n' $found
  else
    set -l key (string match -r '^.*=' -- (commandline -ct))
    for path in (__fish_complete_path (string replace -r '^.*=' '' -- (commandline -ct)))
      echo "$key$path"
    end
  end
end
complete -c mprun -f -a '(__mprun)'
""",
}
_REMOVED = {
    "bash": "complete -r mprun; unset -f _mprun",
    "zsh": "compdef -d mprun; unfunction _mprun",
    "fish": "complete -e -c mprun; functions -e __mprun",
}
# Options whose value is a list of options of a group.
_LISTS = {"--modes": "precision", "--mode": "precision", "--scalers": "scaler"}


def complete(request: str, verbs: dict[str, str], options: list[str]) -> int:
    """Run `-sc install=bash|zsh|fish`, `uninstall=` or `query=`: shell completion."""
    what, _, shell = request.partition("=")
    if what not in ("install", "uninstall", "query"):
        raise BadInput(f"-sc {request}: must be install=SHELL, uninstall=SHELL or query=SHELL")
    if shell not in _SCRIPTS:
        raise BadInput(f"-sc {request}: the shell must be one of bash, zsh, fish")
    if what == "query":
        found = completions(os.environ.get("COMP_LINE", ""), verbs, options)
        # only bash leaves it to us whether a word is complete
        ended = " " if shell == "bash" else ""
        print("".join(f"{one}{'' if one[-1] in '=.,' else ended}\n" for one in found), end="")
    else:
        print((_SCRIPTS if what == "install" else _REMOVED)[shell])
    return DONE


def completions(line: str, verbs: dict[str, str], options: list[str]) -> list[str]:
    """Return the words that the last one of `line` may become; none if it is a path."""
    words = line.split()[1:]
    word = words.pop() if words and not line[-1:].isspace() else ""
    pairs = zip(words, words[1:], strict=False)
    config_dir = next((b for a, b in pairs if a in _DIR and os.path.isdir(b)), None)
    before = words[-1] if words else ""
    if before in (*_DIR, "--out"):
        return []
    if before in _LISTS:
        known = _listed(word, list(option_files(_LISTS[before], config_dir)))
        return [one for one in known if one.startswith(word)]
    verb = verbs[words[0]] if words and words[0] in verbs else None
    if word.startswith("-"):
        found = options if verb is None else _options_of(verb, words[1:])
    else:
        takes = ["KEY=VALUE"]
        if verb is not None:  # as its usage says: `[MODE|RUN|KEY=VALUE ...]`
            usage = _page_of(verb, words[1:]).partition("\n\n")[0]
            told = re.search(r"\[(\S+) \.\.\.\]$", usage)
            takes = told[1].split("|") if told else []
        first = list(option_files("precision", config_dir)) if "MODE" in takes else []
        first += [] if words else list(verbs)
        keys = _overrides(word, words, config_dir) if "KEY=VALUE" in takes else []
        found = [*first, *(key for key in keys if key.rstrip(".") not in first)]
    return [one for one in found if one.startswith(word)]


_DIR = ("--config-dir", "-cd")


def _options_of(verb: str, words: list[str]) -> list[str]:
    return sorted(set(re.findall(r"^  .*?(--[a-z-]+)", _page_of(verb, words), re.MULTILINE)))


def _page_of(verb: str, words: list[str]) -> str:
    """Return the help page of a verb behind `words`, or alone where these are not finished."""
    page = StringIO()
    for given in (words, []):
        with redirect_stdout(page), suppress(SystemExit, BadInput):
            loaded(verb)([*given, "--help"])
        if page.getvalue():
            break
    return page.getvalue()


def _overrides(word: str, words: list[str], config_dir: str | None) -> list[str]:
    """Return `model=`, `optim.`, `optim.lr=` and, after `=`, the known values."""
    key, equals, values = word.partition("=")
    if equals:
        fields = FIELDS.get(key, [])
        known = [str(c) for field in fields for c in field.metadata.get("choices", ())]
        if key in GROUPS:
            known = list(option_files(key, config_dir))
        elif any(field.type is bool for field in fields):
            known = ["false", "true"]
        return [f"{key}={value}" for value in _listed(values, list(dict.fromkeys(known)))]
    own = {}  # group -> the fields of the option chosen on the line
    for group in _OWN_KEYS:
        chosen = [word.partition("=")[2] for word in words if word.startswith(f"{group}=")]
        name = named(group, config_dir).get(chosen[-1]) if chosen else None
        if (component := COMPONENTS[group][0].get(name or "")) is not None:
            own[group] = tuple(component.config.__dataclass_fields__)
    found = [f"{group}=" for group in GROUPS]
    for name in FIELDS:
        group, _, last = name.rpartition(".")
        settable = name not in (*GROUPS, "compare") and not (group and last in BY_OPTION)
        if settable and last in own.get(group, (last,)):
            dot = name.find(".", len(word))
            found.append(name[: dot + 1] if dot > 0 else f"{name}=")
    return list(dict.fromkeys(found))


def _listed(text: str, known: list[str]) -> list[str]:
    """Return each known word after the commas of `text`: sweeps and options take lists."""
    start = text[: text.rfind(",") + 1]
    return [f"{start}{one}" for one in known if one not in start.split(",")]


_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def show(options: argparse.Namespace) -> int:
    """Print the configuration for `--cfg`, as in a run's config.yaml, or Hydra's account of it."""
    flag, what = ("--info", options.info) if options.cfg is None else ("--cfg", options.cfg)
    known = _INFO if options.cfg is None else ("job", "hydra", "all")
    if what not in known:
        raise BadInput(f"{flag} {what}: must be one of {', '.join(known)}")
    from mprun.config.compose import compose_config, prepare_hydra

    composed = compose_config(options.overrides, options.config_dir, files=False)
    if what == "job":
        tree: Any = composed.as_dict()
        for key in options.package.split(".") if options.package else ():
            if not isinstance(tree, dict) or key not in tree:
                raise BadInput(f"--package {options.package}: the configuration has no such part")
            tree = tree[key]
        print(yaml.safe_dump(tree, sort_keys=False), end="")
        return DONE
    import hydra

    from mprun.config.overrides import as_hydra_takes, line_of, parse_overrides

    def not_a_run(config: object) -> None:
        raise AssertionError(f"{flag} must only show the configuration, but Hydra started a run")

    prepare_hydra()
    source = [] if options.config_dir is None else ["--config-dir", options.config_dir]
    lines = [line_of(override) for override in as_hydra_takes(parse_overrides(options.overrides))]
    before, sys.argv = sys.argv, ["mprun", flag, what, *source, *lines]
    shown_by = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    try:
        shown_by(not_a_run)()
    finally:
        sys.argv = before
    return DONE
