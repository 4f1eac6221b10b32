"""The command line: verbs first, everything else is one run (or, with -m, a sweep) of Hydra keys.

Imports torch only once a configuration has been checked, so that help, completion and bad input
answer at once.
"""

import os
import sys
import traceback
from importlib import import_module

from mprun.errors import BAD_INPUT, BUG, DONE, INTERRUPTED, BadInput, MprunError

# verb -> (module with `main(arguments) -> exit code`, what the verb does)
VERBS = {
    "doctor": ("mprun.doctor", "the machine: devices, kernels, flags, what will be emulated"),
}
_HYDRA_FLAGS = ("--hydra-help", "--cfg", "-c", "--info", "-i",
                "--shell-completion", "-sc", "--resolve", "--package", "-p")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the `mprun` command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _dispatch(arguments)
    except MprunError as error:
        print(f"mprun: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # `mprun --help | head`: whoever read stdout has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception:
        traceback.print_exc()
        print("mprun: this is a bug in mprun", file=sys.stderr)
        return BUG


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in VERBS:
        return import_module(VERBS[arguments[0]][0]).main(arguments[1:])
    if "--help" in arguments or "-h" in arguments:
        from mprun.help import help_text

        print(help_text({verb: what for verb, (_, what) in VERBS.items()}), end="")
        return DONE
    if arguments == ["--version"]:
        from mprun import __version__

        print(f"mprun {__version__}")
        return DONE
    if any(flag in arguments for flag in _HYDRA_FLAGS):
        return _hydra(arguments)
    options = _split_options(arguments)
    from mprun.config.compose import compose_config

    if options.multirun:
        from mprun.sweep import sweep

        return sweep(options.overrides, options.config_dir, options.jobs)
    for override in options.overrides:
        if override.startswith("resume=") and override not in ("resume=", "resume=null"):
            from mprun.run import resume

            return resume(tuple(options.overrides), override.partition("=")[2])
    composed = compose_config(options.overrides, options.config_dir)
    from mprun.run import start

    return start(composed)


class _Options:
    """What the command line holds beside overrides."""

    def __init__(self):
        self.overrides: list[str] = []
        self.multirun = False
        self.config_dir: str | None = None
        self.jobs = 1


def _split_options(arguments: list[str]) -> _Options:
    options, rest = _Options(), list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, _, value = argument.partition("=")
        if argument in ("-m", "--multirun"):
            options.multirun = True
        elif flag in ("-j", "--jobs", "--config-dir", "-cd"):
            value = value or (rest.pop(0) if rest else "")
            if flag in ("-j", "--jobs"):
                if not value.isdigit() or int(value) < 1:
                    raise BadInput(f"{flag} {value}: must be a number of processes >= 1")
                options.jobs = int(value)
            else:
                options.config_dir = value
        elif argument.startswith("-"):
            from mprun.config.field_rules import nearest

            known = (*_HYDRA_FLAGS, "--help", "-m", "--multirun", "-j", "--jobs", "--config-dir", "--version")
            raise BadInput(f"{argument}: unknown option{nearest(argument, known)} (see mprun --help)")
        elif "=" not in argument and not argument.startswith("~"):
            from mprun.config.field_rules import nearest

            raise BadInput(f"{argument}: neither a verb ({', '.join(VERBS)}) nor key=value"
                           f"{nearest(argument, VERBS)}")  # fmt: skip
        else:
            options.overrides.append(argument)
    if options.jobs != 1 and not options.multirun:
        raise BadInput(f"-j {options.jobs}: only a sweep (-m) runs several processes")
    return options


def _hydra(arguments: list[str]) -> int:
    """Help, --cfg, --info and completion are Hydra's own; nothing is run."""
    import hydra

    from mprun.config.compose import compose_config, conf_dir
    from mprun.config.schema import register_schemas

    if "--cfg" in arguments or "-c" in arguments:
        # Bad input is told in one line here too, before Hydra prints the configuration.
        compose_config([a for a in arguments if "=" in a and not a.startswith("-")])
    from hydra.core.config_store import ConfigStore

    register_schemas(ConfigStore.instance())
    before, sys.argv = sys.argv, ["mprun", *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(
            _unreachable
        )()
    except SystemExit as stop:
        return BAD_INPUT if stop.code else DONE
    finally:
        sys.argv = before
    return DONE


def _unreachable(config) -> None:
    raise BadInput("this combination of flags would run; leave out --info, --cfg and --help")


if __name__ == "__main__":
    raise SystemExit(main())
