"""`mprun bench --roofline`: the limit of a training step on a named GPU, without that GPU."""

import json
from argparse import Namespace
from typing import TYPE_CHECKING

from mprun.cli.arguments import Arguments, known_modes, names, number
from mprun.config.overrides import parse_overrides
from mprun.errors import DONE, BadInput
from mprun.extensions.bench.roofline.limits import (
    GPUS,
    Ceilings,
    as_text,
    ceilings_of,
    limits,
    why_not,
)
from mprun.extensions.bench.roofline.ranks import LINKS, MOST_RANKS, link_of, nodes_of, on_ranks
from mprun.extensions.bench.roofline.ranks import as_text as ranks_text
from mprun.record.layout import for_terminal

if TYPE_CHECKING:
    from mprun.extensions.bench.roofline.count import Counted

_WHAT = """\
The limit of a training step on a GPU, counted without that GPU. It counts FLOPs and bytes of one
step of the configuration, on tensors without values. From them follow the samples per second that a
GPU cannot exceed, per precision mode, and the memory that it needs. With --ranks it counts instead
how much several GPUs lose to the sum of their gradients."""
_MORE = """\
It never reads data: sizes come from the configuration (data.image_size, model.num_classes, ...).

Exit codes: 0 done, 2 bad input, 130 interrupted."""
DEFAULT_MODES = ("fp32", "tf32", "fp16_master_scaled", "amp", "bf16_master")


def main(arguments: list[str]) -> int:
    """Entry point, without the word --roofline; returns the exit code."""
    options = parse(arguments)
    ceilings = ceilings_of(options.gpu)
    steps, refused = counted_modes(options, ceilings)
    found = limits(steps, ceilings, refused)
    if options.ranks:
        found["ranks"] = on_ranks(steps, found, options.ranks, options.link)
    if options.json:
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        text = ranks_text(found) if options.ranks else as_text(found, options.top)
        print(for_terminal(text))
    return DONE


def parse(arguments: list[str]) -> Namespace:
    """Parse the options of the command line; BadInput names an error."""
    parser = Arguments("bench --roofline", _WHAT, _MORE, overrides=True)
    parser.add_argument("--gpu", default="H200", help=f"{', '.join(GPUS)} (H200)")
    add = parser.add_argument
    add("--mode", type=names("--mode"), metavar="A,B",
        help="precision modes in the order of the output (default: those of "
                f"{','.join(DEFAULT_MODES)} that the GPU supports); for one mode, you can also "
                "pass precision=MODE")  # fmt: skip
    at_most = number("--top", 1, 100, whole=True)
    add("--top", nargs="?", const="10", default=0, type=at_most, metavar="N",
        help="also list the N (10) most expensive kinds of operations of each mode")  # fmt: skip
    add(
        "--ranks",
        type=_ranks,
        metavar="N,M",
        help="instead of a roofline, estimate the speed of N ranks, of M ranks, ...",
    )
    add("--link", type=link_of, metavar="LINK",
        help=f"with --ranks: {', '.join(LINKS)}, or the bandwidth of each GPU to the others in "
                "GB/s")  # fmt: skip
    add("--json", action="store_true", help="print all results as JSON")
    add("--config-dir", metavar="DIR", help="folder with your own option files, as for a run")
    options = parser.parse(arguments)
    if options.mode is not None:
        if _sets_precision(options):
            given = ",".join(options.mode)
            raise BadInput(
                f"--mode {given}: is not allowed together with precision=; use one of the two"
            )
        options.mode = known_modes("--mode", options.mode, options.config_dir)
    _check_ranks(options)
    return options


def _ranks(text: str) -> list[int]:
    one = number("--ranks", 1, MOST_RANKS, "whole numbers", whole=True)
    return list(dict.fromkeys(int(one(word)) for word in text.split(",")))


def _check_ranks(options: Namespace) -> None:
    given, link = ",".join(map(str, options.ranks or ())), options.link
    if link is not None and not given:
        raise BadInput(f"--link {link.name}: is only allowed with --ranks")
    if given and link is None:
        known = ", ".join(LINKS)
        raise BadInput(f"--ranks {given}: needs --link (allowed: {known}, or GB/s of a GPU)")
    if given and options.top:
        raise BadInput(
            f"--top {options.top}: is not allowed together with --ranks; use one of the two"
        )
    for count in options.ranks or ():
        nodes_of(count, link)


def counted_modes(options: Namespace, ceilings: Ceilings) -> tuple[list["Counted"], list[str]]:
    """Return (a step of each mode, why default modes are missing); BadInput for a requested one."""
    from mprun.extensions.bench.roofline.count import count

    modes = [None] if _sets_precision(options) else options.mode or DEFAULT_MODES
    steps, refused = [], []
    for mode in modes:
        counted = count(options.overrides, mode, options.config_dir)
        reason = why_not(counted.policy, counted.overrides, ceilings)
        if reason is None:
            steps.append(counted)
        elif options.mode is not None or mode is None:
            raise BadInput(f"precision={counted.policy.name} --gpu {ceilings.name}: {reason}")
        else:
            refused.append(f"Without {mode}: {reason}.")
    if not steps:
        raise BadInput(f"--gpu {ceilings.name}: supports none of the modes; {refused[0]}")
    return steps, refused


def _sets_precision(options: Namespace) -> bool:
    return any(o.key_or_group == "precision" for o in parse_overrides(options.overrides))
