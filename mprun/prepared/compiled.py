"""The part of a call that torch.compile takes: what the model computes, as one graph.

    compiled = torch.compile(model, fullgraph=True)      # before `prepare` or after it

The border of a prepared model is code for eager mode: contexts, nodes, dictionaries of tensors. So
a call sets the compiler aside, and gives it back for the one function that computes. Within it
modules hold plain functions in place of `Forward`, which a compiler cannot follow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from mprun.prepared.border import Forward
from mprun.torch_private import count_as_compiled, grouped_mm, let_compilers_show, set_compiler


class Compiled:
    """Let the compiler of a caller take what the calls of a model compute.

    Attributes:
        is_seen: something sees each operation of this call, so it runs without the compiler.
        in_layers: this call has hooks between its layers, or gathers weights, so each layer is
            compiled by itself.
    """

    def __init__(self) -> None:
        self.is_seen = self.in_layers = self._has_told = False
        self._taken: set[Forward] = set()

    def compute(
        self, compiler: Any, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute a module within a call in the mode.

        compiler: what `set_compiler` has returned, and is set aside; None: nobody compiles.
        """
        if compiler is None:
            return forward.compute_within(args, kwargs)
        if self.is_seen:
            count_as_compiled()
            return forward.compute_within(args, kwargs)
        if self.in_layers:
            return taken_by(compiler, forward.compute_within, (args, kwargs), {})
        with _plain_functions(forward.module, in_mode=True), self._first_of(forward):
            return taken_by(compiler, *_frame(forward, True, args), kwargs)

    @staticmethod
    def evaluate(
        compiler: Any, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute a module within an evaluation without the mode, likewise."""
        if compiler is None:
            return forward.plainly(*args, **kwargs)
        with _plain_functions(forward.module, in_mode=False):
            return taken_by(compiler, *_frame(forward, False, args), kwargs)

    @contextmanager
    def _first_of(self, forward: Forward) -> Iterator[None]:
        """Leave out, where a module is compiled, what torch says of weights that are no leaves."""
        if forward in self._taken:
            yield
            return
        self._taken.add(forward)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
            yield

    def tell(self, mode: str, places: Iterable[str]) -> None:
        """Tell once that calls run without the compiler, for what their forward needs."""
        if not self._has_told:
            self._has_told = True
            where = ", ".join(sorted(places)) or "hooks of tensors"
            warnings.warn(
                f"the model is not compiled: a compiler does not see what serves its forward in "
                f"{mode} ({where})",
                stacklevel=2,
            )


def taken_by(
    compiler: Any,
    compute: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function and let a compiler take its frames, which is set aside before and behind."""
    if compiler is not None:
        let_compilers_show(grouped_mm)
    set_compiler(compiler)
    try:
        return compute(*args, **kwargs)
    finally:
        set_compiler(None)


def _frame(
    forward: Forward, in_mode: bool, args: Sequence[Any]
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Return a function with its arguments, in whose frame a compiler begins."""
    own, module = forward.own_function(in_mode), forward.module
    if own is not None:
        return own, args
    function = type(module).forward
    if function.__module__.startswith("torch.nn."):  # which it passes over
        return _called, (function, module, *args)
    return function, (module, *args)


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@contextmanager
def _plain_functions(model: nn.Module, in_mode: bool) -> Iterator[None]:
    """Let modules of a model hold the functions that compute in the mode, or without it."""
    replaced = []
    for module in model.modules():
        place = module.__dict__
        if isinstance(forward := place.get("forward"), Forward):
            replaced.append((place, forward))
            if (own := forward.own_function(in_mode)) is None:
                del place["forward"]
            else:
                place["forward"] = own
    try:
        yield
    finally:
        for place, forward in replaced:
            place["forward"] = forward
