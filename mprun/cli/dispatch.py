"""The command line: verbs first, everything else is one run (or, with -m, a sweep) of Hydra keys.

Whatever becomes of the terminal (closed, full, its reader gone): what is said there ends nothing.

Imports torch only once a configuration has been checked, so that help, completion and bad input
answer at once.
"""

import argparse
import errno
import os
import re
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path

from mprun.cli.arguments import Arguments, number
from mprun.errors import BAD_INPUT, BUG, DAMAGED, DONE, INTERRUPTED, RESOURCE, BadInput, MprunError
from mprun.record.console import steady_terminal
from mprun.training.signals import Interruption, Stopped

# verb -> (module with `main(arguments) -> exit code`, what the verb does)
VERBS = {
    "compare": ("mprun.cli.compare", "finished runs: a verdict per precision mode, a report"),
    "advise": ("mprun.cli.advise", "what FP16 needs: masters, scale, FP32 modules"),
    "explain": ("mprun.cli.explain", "a run that diverged: its cause, what cures it"),
    "scaler-replay": (
        "mprun.cli.scaler_replay",
        "what every loss scaler would have done on a run's overflows",
    ),
    "bench": ("mprun.cli.bench", "speed, memory and energy per mode; share of the limit"),
    "doctor": ("mprun.cli.doctor", "the machine: devices, kernels, graphs, modes (--json)"),
}
# A full disk, a quota, a read-only or failing file system, a forbidden folder; and what is no path.
_OF_THE_SYSTEM = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO), RESOURCE),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE), RESOURCE),
    **{errno.ENOMEM: RESOURCE, errno.ENAMETOOLONG: BAD_INPUT},
}
_MORE = " ... (mprun --help)"


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the `mprun` command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with steady_terminal(), Interruption() as interruption:
        return _ended(arguments, interruption)


def _ended(arguments: list[str], interruption: Interruption) -> int:
    try:
        with interruption.breaks():
            code = _dispatch(arguments)
            sys.stdout.flush()
        return code
    except MprunError as error:
        # A damaged file is named in full, however long its path.
        longest = 600 if error.exit_code == DAMAGED else 200
        print(_one_line(f"mprun: {error}", longest), file=sys.stderr)
        return error.exit_code
    except SystemExit as ended:  # argparse, after a help page
        return int(ended.code or DONE)
    except Stopped as stopped:
        return INTERRUPTED if str(stopped) == "SIGINT" else 128 + signal.Signals[str(stopped)]
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # `mprun --help | head`: whoever read stdout has seen enough, of what may be unfinished.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _OF_THE_SYSTEM:
            return _bug()
        place = f": {error.filename}" if error.filename else ""
        print(_one_line(f"mprun: {error.strerror}{place}"), file=sys.stderr)
        return _OF_THE_SYSTEM[error.errno]
    except Exception:  # whatever is left is ours: shown with its traceback, exit code 1
        return _bug()


def _bug() -> int:
    traceback.print_exc()
    print("mprun: this is a bug in mprun", file=sys.stderr)
    return BUG


def _one_line(text: str, longest: int = 200) -> str:
    """At most `longest` characters: what is named and meant comes first, what is allowed last.

    Of a long list of what is allowed the end goes, of all else the middle.
    """
    text = "".join(c if c.isprintable() else " " for c in text)
    if len(text) <= longest:
        return text
    words = (w if len(w) <= 100 else f"{w[:60]}...{w[-30:]}" for w in text.split(" "))
    text = " ".join(words)
    if len(text) <= longest:
        return text
    if not re.search("one of|allowed: |choose |a verb ", text):
        return f"{text[: longest - 80]} ... {text[-75:]}"
    whole, _, _ = text[: longest - len(_MORE)].rpartition(" ")
    return whole.rstrip(",") + _MORE


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("run", "train"):
        print(f"mprun: '{arguments[0]}' may be left out", file=sys.stderr)
        arguments = arguments[1:]
    if arguments and arguments[0] in VERBS:
        return import_module(VERBS[arguments[0]][0]).main(arguments[1:])
    if {"--help", "-h"} & set(arguments):
        return _help(arguments)
    options = _arguments().parse(arguments)
    _check_belonging(options)
    if options.version:
        from mprun import __version__

        print(f"mprun {__version__}")
        return DONE
    if {options.shell_completion, options.cfg, options.info} != {None}:
        return _show(options)
    if options.multirun:
        from mprun.sweep import STALL_AFTER_S, sweep

        stall_after = STALL_AFTER_S if options.stall_after is None else options.stall_after
        return sweep(options.overrides, options.config_dir, options.jobs, stall_after, _curves)
    return _run(options)


def _curves(folders: list[Path], root: Path) -> Path:
    from mprun.compare.tensorboard_summary import write_means

    return write_means(folders, root)


def _help(arguments: list[str]) -> int:
    from mprun.cli.help import help_text

    verbs = {verb: what for verb, (_, what) in VERBS.items()}
    others = [word for word in arguments if word not in ("--help", "-h")]
    options, _ = _arguments().parse_known_args(others)
    print(help_text(verbs, _arguments(), options.config_dir), end="")
    return DONE


def _show(options: argparse.Namespace) -> int:
    from mprun.cli.help import complete, show_config, show_info

    if options.shell_completion is not None:
        known = [name for one in _arguments()._actions for name in one.option_strings]
        modules = {verb: module for verb, (module, _) in VERBS.items()}
        return complete(options.shell_completion, modules, known)
    if options.cfg is not None:
        return show_config(options.cfg, options.overrides, options.config_dir, options.package)
    return show_info(options.info, options.overrides, options.config_dir)


def _run(options: argparse.Namespace) -> int:
    for override in options.overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key == "resume" and value != "null":
            _announce(f"going on with {value}")
            from mprun.training.resume import resume

            return resume(tuple(options.overrides), value, options.config_dir)
    from mprun.config.compose import compose_config

    composed = compose_config(options.overrides, options.config_dir)
    choices, config = composed.choices, composed.config
    _announce(
        f"{choices['model']} on {choices['data']}, precision={composed.mode}, "
        f"device={config.device}"
    )
    from mprun.training.run import start

    return start(composed)


def _announce(text: str) -> None:
    """Before torch is imported, which takes seconds: to whoever waits at a terminal.

    Elsewhere a run that cannot begin is one line on stderr.
    """
    if sys.stderr.isatty():
        print(_one_line(f"mprun: {text} ..."), file=sys.stderr, flush=True)


def _arguments() -> Arguments:
    """The options of a run or a sweep: Hydra's, and two of a sweep's own."""
    parser = Arguments("", "", overrides=True, verbs=VERBS)
    add = parser.add_argument
    add("-m", "--multirun", action="store_true", help="sweep: one process per run")
    processes = number("-j", 1, 1024, "a number of processes", whole=True)
    add("-j", "--jobs", type=processes, metavar="N", help="sweep: N runs at a time (1)")
    seconds = "sweep: kill a run without progress for so long (1800; 0: never)"
    add("--stall-after", type=_seconds, metavar="SECONDS", help=seconds)
    add("-cd", "--config-dir", metavar="DIR", help="options of your own: DIR/GROUP/OPTION.yaml")
    add("-c", "--cfg", metavar="job|hydra|all", help="print the configuration, run nothing")
    add("-p", "--package", default="", metavar="KEY", help="of --cfg job: this part alone")
    add("--resolve", action="store_true", help="of --cfg: what it prints is resolved anyway")
    add("-i", "--info", metavar="WHAT", help="Hydra's account: defaults, searchpath, config, ...")
    completion = "shell completion for bash, zsh, fish"
    add("-sc", "--shell-completion", metavar="install=SHELL", help=completion)
    add("--version", action="store_true", help="print the version")
    return parser


def _seconds(text: str) -> float:
    if not text.isdecimal() or int(text[:12]) > 10**9:
        raise BadInput(f"--stall-after {text}: must be seconds >= 0 (0: never)")
    return float(text)


def _check_belonging(options: argparse.Namespace) -> None:
    """BadInput for an option that says something about what was not asked for."""
    if (options.resolve or options.package) and options.cfg is None:
        raise BadInput("--resolve, --package: only with --cfg")
    if options.jobs is not None and not options.multirun:
        raise BadInput(f"-j {options.jobs}: only a sweep (-m) runs several processes")
    if options.stall_after is not None and not options.multirun:
        raise BadInput(f"--stall-after {options.stall_after:g}: only a sweep (-m) watches its runs")


if __name__ == "__main__":
    raise SystemExit(main())
