"""The command line: a verb first, or one run (with -m a sweep) of Hydra keys.

A terminal that is closed, full or has lost its reader never ends a run. torch is only imported once
a configuration has been checked, so that help, completion and bad input answer at once.
"""

import argparse
import errno
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mprun import __version__, errors
from mprun.cli.arguments import Arguments, number
from mprun.distributed import rank_info as ranks_here
from mprun.distributed.rank_info import RankInfo, is_restart
from mprun.entry_points import announced, loaded
from mprun.errors import BAD_INPUT, DONE, RESOURCE, BadInput, MprunError, needing, shortened
from mprun.file_system import FAILING
from mprun.record.console import steady_terminal
from mprun.spelling import became
from mprun.training.signals import Interruption

if TYPE_CHECKING:
    from mprun.config.compose import Composed
    from mprun.config.schema import RunConfig

# verb -> `module:function`, which takes the arguments and returns the exit code.
VERBS = {
    "compare": "mprun.cli.compare:main",
    "ls": "mprun.cli.ls:main",
    "show": "mprun.cli.show:main",
    "doctor": "mprun.cli.doctor:main",
}
# A failing or read-only file system, a forbidden folder, too many open files, or an invalid path.
_OF_THE_SYSTEM = {
    **dict.fromkeys((*FAILING, errno.EROFS, errno.EACCES, errno.EPERM), RESOURCE),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.ENOMEM), RESOURCE),
    **{errno.ENAMETOOLONG: BAD_INPUT, errno.ELOOP: BAD_INPUT},
}
# Keys for the place of a run, not its content.
_OF_RANKS = ("devices", "nodes", "restarts")
_LAST = 75  # characters of a line's last words that stay where its middle goes, at most
# Characters that a path keeps at least, at both ends. One of more than _LONG loses its middle in
# any line that is too long.
_SHORT, _LONG = 60, 100
_TOLD_S = 10.0  # for rank 0 to say why nothing is started


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the `mprun` command; returns the exit code."""
    own_process = arguments is None
    arguments = sys.argv[1:] if arguments is None else arguments
    with steady_terminal(), Interruption(ends_process=own_process) as interruption:
        code = _ended(arguments, interruption)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        # A library that waits for lost ranks would hang or abort, and hide how this one ended.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


def _ended(arguments: list[str], interruption: Interruption) -> int:
    try:
        with interruption.breaks(), needing("cli"):
            code = _dispatch(arguments)
            sys.stdout.flush()
        return code
    except MprunError as error:
        print(_one_line(f"mprun: {error}", error.longest), file=sys.stderr)
        return error.exit_code
    except SystemExit as ended:  # argparse, after a help page
        return int(ended.code or DONE)
    except KeyboardInterrupt as stopped:
        return errors.exit_code_of(stopped)
    except BrokenPipeError:
        # `mprun --help | head`: the reader of stdout has closed it, perhaps before the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno in _OF_THE_SYSTEM:
            place = f": {error.filename}" if error.filename else ""
            print(_one_line(f"mprun: {error.strerror}{place}"), file=sys.stderr)
            return _OF_THE_SYSTEM[error.errno]
        return errors.report_bug(error)
    except Exception as error:
        if "torch" in sys.modules or isinstance(error, MemoryError):
            from mprun.record.memory import ran_out, shortage  # here: imports torch

            if ran_out(error):
                print(_one_line(f"mprun: {shortage(error)}", 600), file=sys.stderr)
                return errors.RESOURCE
        if "torch" in sys.modules:
            from mprun.torch_private import said_by_a_compiler  # here: imports torch

            if said := said_by_a_compiler(error):
                print(_one_line(f"mprun: torch.compile: {said}"), file=sys.stderr)
                return errors.BAD_INPUT
        return errors.report_bug(error)


def _one_line(text: str, longest: int = 200) -> str:
    """Cut to at most `longest` characters, at words; the name comes first, what is allowed last.

    A long list of allowed values loses its end, any other text its middle.
    """
    text = "".join(c if c.isprintable() else " " for c in text)
    if len(text) <= longest:
        return text
    # A long path gives way, not the message beside it.
    words = text.split(" ")
    long = [len(word) for word in words if len(word) > _SHORT]
    most = max(_SHORT, (longest - len(text) + sum(long)) // max(1, len(long)))
    narrow = " ".join(shortened(word, most) if len(word) > most else word for word in words)
    if len(narrow) <= longest:
        return narrow
    words = [shortened(word, _SHORT) if len(word) > _LONG else word for word in words]
    text = " ".join(words)
    room = min(_LAST, longest - len(" ".join([*words[:2], "..."])))
    if re.search("one of|allowed: |choose |a verb ", text):
        from mprun.cli.help import GROUPS

        group = re.match(r"(?:mprun: )?([a-z]+)[.=]", text)
        known = f" {group[1]}" if group is not None and group[1] in GROUPS else ""
        more = f" ... (mprun --help{known})"
        whole, _, _ = text[: longest - len(more)].rpartition(" ")
        if whole.count("(") > whole.count(")"):
            more = f" ...; mprun --help{known})"
        return whole.rstrip(",") + more
    last: list[str] = []
    while len(" ".join([words[-1], *last])) < room:
        last.insert(0, words.pop())
    # A parenthesis is left whole, or out: its rest alone would say nothing.
    starts = [at for at in range(len(last)) if _closes(" ".join(last[at:]))]
    end = " ".join(["", *last[starts[0] if starts else 0 :]])
    start = shortened(" ".join(words), longest - len(end))
    if start.count("(") > start.count(")") and _closes(end):
        start = start[: start.rindex("(")].rstrip() + " ..."
    return start + end


def _closes(text: str) -> bool:
    """Return whether the text closes no parenthesis that it has not opened."""
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return False
    return True


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("run", "train"):
        print(f"mprun: '{arguments[0]}' may be left out", file=sys.stderr)
        arguments = arguments[1:]
    if arguments and (verb := verbs().get(arguments[0])) is not None:
        return loaded(verb)(arguments[1:])
    if arguments and "=" not in arguments[0] and (now := became(arguments[0])):
        raise BadInput(f"{arguments[0]}: {now}")
    if {"--help", "-h"} & set(arguments):
        return _help(arguments)
    options = _arguments().parse(arguments)
    _refuse_contradictions(options)
    if options.verbose:
        options.overrides.append("verbose=true")
    if options.version:
        print(f"mprun {__version__}")
        return DONE
    if {options.shell_completion, options.cfg, options.info} != {None}:
        from mprun.cli.help import complete, show

        if options.shell_completion is None:
            return show(options)
        known = [name for one in _arguments()._actions for name in one.option_strings]
        return complete(options.shell_completion, verbs(), known)
    if options.multirun:
        if ranks_here.rank_info_from() is not None:
            raise BadInput(
                "-m: a sweep starts the ranks of its runs itself; start the sweep in a single "
                "process"
            )
        from mprun.sweeps import STALL_AFTER_S, sweep

        stall_after = STALL_AFTER_S if options.stall_after is None else options.stall_after
        given, folder, again = options.overrides, options.config_dir, options.rerun_damaged
        return sweep(given, folder, options.jobs, stall_after, again, says_next=True)
    return _run(options)


def _refuse_contradictions(options: argparse.Namespace) -> None:
    if (options.resolve or options.package) and options.cfg is None:
        raise BadInput("--resolve, --package: are only allowed with --cfg")
    if options.multirun:
        return
    if options.jobs is not None:
        raise BadInput(f"-j {options.jobs}: is only for a sweep (-m), which runs several processes")
    if options.stall_after is not None:
        raise BadInput(
            f"--stall-after {options.stall_after:g}: is only for a sweep (-m), which watches its "
            "runs"
        )
    if options.rerun_damaged:
        raise BadInput("--rerun-damaged: is only for a sweep (-m)")


def verbs() -> dict[str, str]:
    """Return verb -> `module:function` of every verb, those of extensions last."""
    return VERBS | announced("mprun.verbs")


def _help(arguments: list[str]) -> int:
    """Print the help page, or that of the keys, groups and verbs beside --help."""
    from mprun.cli.help import GROUPS, first_page, help_text, key_help, option_help

    others = [word for word in arguments if word not in ("--help", "-h")]
    options, _ = _arguments().parse_known_args(others)
    given = [word for word in options.overrides if not word.startswith("~")]
    asked = [word for word in given if "=" not in word or word.partition("=")[0] in GROUPS]
    if asked and asked[0] in verbs().keys() - {*GROUPS, "compare"}:
        return loaded(verbs()[asked[0]])(["--help"])
    if asked == ["all"]:
        print(help_text(verbs(), _arguments(), options.config_dir), end="")
        return DONE
    pages = []
    for word in asked:
        group, chosen, option = word.partition("=")
        of_option = partial(option_help, group, option)
        of_key = partial(key_help, word, verbs())
        pages.append((of_option if chosen else of_key)(options.config_dir))
    print("\n".join(pages) or first_page(verbs()), end="")
    return DONE


def _run(options: argparse.Namespace) -> int:
    overrides, rank_info = ranks_here.completed(options.overrides, ranks_here.rank_info_from())
    if rank_info is not None:
        # Its lines are about sockets, with frames of C++; each error raises an exception as well.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from mprun.config.compose import compose_config
    from mprun.config.overrides import parse_overrides

    for override in overrides:
        if override.lstrip("+").partition("=")[0] == "resume":
            [parsed] = parse_overrides((override,))
            if (path := parsed.value()) is not None:
                return _resumed(overrides, str(path), options.config_dir, rank_info)
    composed = compose_config(overrides, options.config_dir)
    choices, config = composed.choices, composed.config
    if rank_info is None or rank_info.is_first:
        _announce(
            f"{choices['model']} on {choices['data']}, precision={composed.mode}, "
            f"device={config.device}"
        )
    if (devices := _to_start(config, rank_info)) > 1:
        return _launched(overrides, devices, config, options.config_dir, rank_info)
    if is_restart():
        before, code = _attempt_before(_directories(composed), rank_info)
        if code is not None:
            return code
        if before is not None:
            again = (*_lasting(overrides, config), f"resume={before}")
            return _resumed(again, str(before), None, rank_info)
    from mprun.training.run import start

    return start(composed, rank_info)


def _resumed(
    overrides: tuple[str, ...], path: str, config_dir: str | None, rank_info: RankInfo | None
) -> int:
    if is_restart() and (code := _attempt_before([Path(path)], rank_info)[1]) is not None:
        return code
    if rank_info is None or rank_info.is_first:
        _announce(f"going on with {path}")
    if rank_info is None or rank_info.rank is None:
        from mprun.training.continuation import continued

        config = continued(overrides, path, config_dir)
        if (devices := _to_start(config, rank_info)) > 1:
            return _launched(overrides, devices, config, config_dir, rank_info)
    from mprun.training.resume import resume

    return resume(overrides, path, config_dir, rank_info)


def _directories(composed: "Composed") -> Iterator[Path]:
    """Yield where a run of this configuration may have been begun, the newest first."""
    from mprun.record.run_directory import claimed_before

    if composed.config.output_dir is not None:
        yield Path(composed.config.output_dir)
        return
    place = composed.place()
    yield from claimed_before(place.parent, place.name)


def _attempt_before(
    directories: Iterable[Path], rank_info: RankInfo | None
) -> tuple[Path | None, int | None]:
    """Return the directory of the attempt that torchrun repeats, and its code if that is final."""
    directory, record = ranks_here.earlier_attempt(directories) or (None, {})
    code = ranks_here.final_code(record)
    if code and (rank_info is None or rank_info.is_first):
        cause = record.get("cause") or record["status"]
        print(_one_line(f"mprun: {directory}: not started again: {cause}", 600), file=sys.stderr)
    elif code:
        time.sleep(_TOLD_S)  # torchrun ends all ranks when the first one ends
    return directory, code


def _to_start(config: "RunConfig", rank_info: RankInfo | None) -> int:
    """Return the number of ranks to start on this machine; 1: only this process."""
    if rank_info is not None:
        return rank_info.devices if rank_info.rank is None else 1
    if config.nodes > 1:
        by = f"torchrun --nnodes {config.nodes} --nproc-per-node {config.devices} -m mprun"
        raise BadInput(
            f"nodes={config.nodes}: nothing says which machine this is; start the run by srun, or "
            f"by {by}"
        )
    if config.devices != "auto":
        return int(config.devices)
    from mprun.training.run import resolve_device

    if resolve_device(config.device).type != "cuda":
        return 1
    import torch

    from mprun.config.execution_rules import why_not_on

    count = torch.cuda.device_count()
    for line in why_not_on(replace(config, devices=str(count)), count):
        raise BadInput(line)
    return count


def _launched(
    overrides: tuple[str, ...],
    devices: int,
    config: "RunConfig",
    config_dir: str | None,
    rank_info: RankInfo | None,
) -> int:
    from mprun.distributed.launch import launch
    from mprun.sweeps.gpus import available_cores
    from mprun.training.run import resolve_device

    most, what = max(8, 4 * available_cores()), f"{available_cores()} cores"
    if resolve_device(config.device).type == "cuda":
        import torch

        most = torch.cuda.device_count()
        what = f"{most} GPUs"
    if devices > most:
        raise BadInput(f"devices={devices}: this machine has {what} (allowed: 1 to {most}, auto)")
    from mprun.config.overrides import without

    return launch(
        [*without(overrides, "devices"), f"devices={devices}"],
        devices,
        config_dir=config_dir,
        rank_info=rank_info,
        restarts=config.restarts,
        kept=_lasting(overrides, config),
        module="mprun.sweeps.child",
    )


def _lasting(overrides: tuple[str, ...], config: "RunConfig") -> tuple[str, ...]:
    """Return the overrides that a continuation needs again: what it names, and where it runs."""
    from mprun.config.trust import as_overrides

    of_ranks = (o for o in overrides if o.partition("=")[0] in _OF_RANKS)
    return (*as_overrides(asdict(config)), *of_ranks)


def _announce(text: str) -> None:
    """Tell a waiting user at a terminal, before torch is imported, which takes seconds."""
    if sys.stderr.isatty():
        print(_one_line(f"mprun: {text} ..."), file=sys.stderr, flush=True)


def _arguments() -> Arguments:
    """Return a parser for a run or a sweep: Hydra's options, and two for sweeps."""
    parser = Arguments("", "", overrides=True, verbs=verbs())
    add = parser.add_argument
    add("-m", "--multirun", action="store_true", help="start a sweep: one process per run")
    processes = number("-j", 1, 1024, "a number of processes", whole=True)
    add(
        "-j",
        "--jobs",
        type=processes,
        metavar="N",
        help="in a sweep: run at most N runs at the same time (1)",
    )
    seconds = "in a sweep: kill a run without progress for SECONDS (1800; 0: never)"
    add("--stall-after", type=_seconds, metavar="SECONDS", help=seconds)
    damaged = "sweep: run finished runs with damaged files again"
    add("--rerun-damaged", action="store_true", help=damaged)
    add(
        "-cd",
        "--config-dir",
        metavar="DIR",
        help="folder with your own option files, DIR/GROUP/OPTION.yaml",
    )
    add("-c", "--cfg", metavar="job|hydra|all", help="print the configuration and run nothing")
    add(
        "-p", "--package", default="", metavar="KEY", help="with --cfg job: print only the part KEY"
    )
    add(
        "--resolve",
        action="store_true",
        help="resolve interpolations in the output of --cfg, as mprun always does",
    )
    add(
        "-i",
        "--info",
        metavar="WHAT",
        help="print a report of Hydra: defaults, searchpath, config, ...",
    )
    completion = "shell completion for bash, zsh, fish"
    add("-sc", "--shell-completion", metavar="install=SHELL", help=completion)
    verbose = "print a table of the operations and memory of step 1, not only a summary"
    add("-v", "--verbose", action="store_true", help=verbose)
    add("--version", action="store_true", help="print the version")
    return parser


def _seconds(text: str) -> float:
    if not text.isdecimal() or int(text[:12]) > 10**9:
        raise BadInput(f"--stall-after {text}: must be a number of seconds >= 0 (0: never)")
    return float(text)
