"""The user's own functions: found by name, called, and held to what they must return.

Whoever hands a name in has made sure that the user gave it (mprun.config.user_code).
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mprun.config.rules import nearest
from mprun.errors import BadInput, MprunError, raised


class Factory:
    """The function that `name`, package.module:function, stands for; BadInput if there is none.

    key: "data.factory" or "model.factory", for messages. Importing it runs the module's code. The
    current folder is searched first, as `python -m` does.
    """

    def __init__(self, key: str, name: str):
        self.key, self.name = key, name
        self.function = _found(key, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """What the function returns; BadInput if it does not take these arguments or raises."""
        self._check_arguments(arguments, options)
        try:
            return self.function(*arguments, **options)
        except MprunError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise BadInput(f"{self}: {raised(error)}") from error

    def __str__(self) -> str:
        return f"{self.key}={self.name}"

    def _check_arguments(self, arguments: tuple, options: Mapping[str, Any]) -> None:
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # of some compiled functions nothing is known
            return
        try:
            signature.bind(*arguments, **options)
        except TypeError as error:
            given = ", ".join([*("data" for _ in arguments), *options])
            raise BadInput(f"{self}: {error} (it is given {given})") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, which torch tells of a CPU as a bare RuntimeError."""
    text = str(error)
    of_cpu = "DefaultCPUAllocator" in text or "Storage size calculation overflowed" in text
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or of_cpu


def _found(key: str, name: str) -> Callable:
    module_name, _, function_name = name.partition(":")
    # `python -m mprun` has it there already, the installed command has not.
    if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        wanted = module_name.split(".")
        parents = {".".join(wanted[: count + 1]) for count in range(len(wanted))}
        if error.name in parents:
            raise BadInput(
                f"{key}={name}: no module named '{error.name}' (looked in {os.getcwd()} and where "
                "Python looks)"
            ) from None
        raise BadInput(f"{key}={name}: importing it: {raised(error)}") from error
    except (Exception, SystemExit) as error:
        raise BadInput(f"{key}={name}: importing it: {raised(error)}") from error
    if not hasattr(module, function_name):
        hint = nearest(function_name, [word for word in vars(module) if word[0] != "_"])
        raise BadInput(f"{key}={name}: {module_name} has no '{function_name}'{hint}")
    function = getattr(module, function_name)
    if not callable(function):
        raise BadInput(f"{key}={name}: is a {type(function).__name__}, must be a function")
    return function
