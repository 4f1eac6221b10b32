"""The command line: verbs first, everything else is one run (or, with -m, a sweep) of Hydra keys.

Imports torch only once a configuration has been checked, so that help, completion and bad input
answer at once.
"""

import errno
import os
import sys
import traceback
from dataclasses import dataclass, field
from importlib import import_module

from mprun.config.rules import nearest
from mprun.errors import BUG, DAMAGED, DONE, INTERRUPTED, RESOURCE, BadInput, MprunError

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
# Options with a value, by every spelling.
_WITH_VALUE = {
    "-j": "jobs",
    "--jobs": "jobs",
    "--stall-after": "stall_after",
    "--config-dir": "config_dir",
    "-cd": "config_dir",
    "--cfg": "cfg",
    "-c": "cfg",
    "--info": "info",
    "-i": "info",
    "--package": "package",
    "-p": "package",
    "--shell-completion": "completion",
    "-sc": "completion",
}
_WITHOUT_VALUE = ("-m", "--multirun", "--resolve", "-h", "--help", "--version")
# A full disk, a quota, a read-only or failing file system, a forbidden folder.
_RESOURCE_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the `mprun` command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _dispatch(arguments)
    except MprunError as error:
        # A damaged file is named in full, however long its path.
        longest = 600 if error.exit_code == DAMAGED else 200
        print(_one_line(f"mprun: {error}", longest), file=sys.stderr)
        return error.exit_code
    except SystemExit as ended:  # argparse, after a help page
        return int(ended.code or DONE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # `mprun --help | head`: whoever read stdout has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        if error.errno not in _RESOURCE_ERRORS:
            return _bug()
        print(_one_line(f"mprun: {error.strerror}: {error.filename}"), file=sys.stderr)
        return RESOURCE
    except Exception:  # whatever is left is ours: shown with its traceback, exit code 1
        return _bug()


def _bug() -> int:
    traceback.print_exc()
    print("mprun: this is a bug in mprun", file=sys.stderr)
    return BUG


def _one_line(text: str, longest: int = 200) -> str:
    """At most `longest` characters: what is named comes first, what is allowed last."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= longest else f"{text[: longest - 80]} ... {text[-75:]}"


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in VERBS:
        return import_module(VERBS[arguments[0]][0]).main(arguments[1:])
    if "--help" in arguments or "-h" in arguments:
        from mprun.cli.help import help_text

        print(help_text({verb: what for verb, (_, what) in VERBS.items()}), end="")
        return DONE
    if arguments == ["--version"]:
        from mprun import __version__

        print(f"mprun {__version__}")
        return DONE
    options = _split_options(arguments)
    if options.completion is not None:
        from mprun.cli.help import complete

        return complete(options.completion)
    if options.cfg is not None:
        from mprun.cli.help import show_config

        return show_config(options.cfg, options.overrides, options.config_dir, options.package)
    if options.info is not None:
        from mprun.cli.help import show_info

        return show_info(options.info, options.overrides, options.config_dir)
    if options.multirun:
        from mprun.sweep import STALL_AFTER_S, sweep

        return sweep(
            options.overrides,
            options.config_dir,
            jobs=None if options.jobs is None else int(options.jobs),
            stall_after=float(options.stall_after or STALL_AFTER_S),
        )
    for override in options.overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key == "resume" and value != "null":
            from mprun.training.resume import resume

            return resume(tuple(options.overrides), value, options.config_dir)
    from mprun.config.compose import compose_config

    composed = compose_config(options.overrides, options.config_dir)
    from mprun.training.run import start

    return start(composed)


@dataclass(slots=True)
class _Options:
    """What the command line holds beside overrides."""

    overrides: list[str] = field(default_factory=list)
    multirun: bool = False
    config_dir: str | None = None
    jobs: str | None = None
    stall_after: str | None = None
    cfg: str | None = None
    info: str | None = None
    package: str = ""
    completion: str | None = None


def _split_options(arguments: list[str]) -> _Options:
    options, rest, resolve = _Options(), list(arguments), False
    while rest:
        argument = rest.pop(0)
        flag, given, value = argument.partition("=")
        if argument in ("-m", "--multirun"):
            options.multirun = True
        elif flag in _WITH_VALUE:
            if not given:
                value = rest.pop(0) if rest and not rest[0].startswith("-") else ""
            if not value:
                raise BadInput(f"{flag}: needs a value (see mprun --help)")
            setattr(options, _WITH_VALUE[flag], value)
        elif argument == "--resolve":
            resolve = True  # what --cfg prints is resolved anyway
        elif argument.startswith("-"):
            hint = nearest(argument, (*_WITH_VALUE, *_WITHOUT_VALUE))
            raise BadInput(f"{argument}: unknown option{hint} (see mprun --help)")
        elif "=" not in argument and not argument.startswith("~"):
            raise BadInput(
                f"'{argument}': neither a verb ({', '.join(VERBS)}) nor key=value"
                f"{nearest(argument, VERBS)}"
            )
        else:
            options.overrides.append(argument)
    if (resolve or options.package) and options.cfg is None:
        raise BadInput("--resolve, --package: only with --cfg")
    _check_sweep_options(options)
    return options


def _check_sweep_options(options: _Options) -> None:
    jobs, stall_after = options.jobs, options.stall_after
    if jobs is not None:
        if not jobs.isdecimal() or not 1 <= int(jobs[:9]) <= 1024:
            raise BadInput(f"-j {jobs}: must be a number of processes from 1 to 1024")
        if not options.multirun:
            raise BadInput(f"-j {jobs}: only a sweep (-m) runs several processes")
    if stall_after is not None:
        if not stall_after.isdecimal() or int(stall_after[:12]) > 10**9:
            raise BadInput(f"--stall-after {stall_after}: must be seconds >= 0 (0: never)")
        if not options.multirun:
            raise BadInput(f"--stall-after {stall_after}: only a sweep (-m) watches its runs")


if __name__ == "__main__":
    raise SystemExit(main())
