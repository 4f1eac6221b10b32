"""`mprun logprobs MODE ... RUN`: compare log-probabilities of the same weights between modes."""

from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mprun.cli.arguments import Arguments, number
from mprun.config.compose import compose_config, config_from_record
from mprun.config.option_files import modes
from mprun.config.registry import task_of
from mprun.config.schema import MAX_STEPS, RunConfig
from mprun.config.trust import vouched
from mprun.errors import BadInput, Damaged, MprunError
from mprun.extensions.diagnosis.commands import page, record_of, split_words, unfinished
from mprun.record.run_directory import read_config
from mprun.record.run_record import read_record, refuse_older_state

if TYPE_CHECKING:
    from torch import Tensor

    from mprun.assembly import Built
    from mprun.extensions.diagnosis.log_probabilities import Difference

TOKENS, BATCH, BAND = 8192, 16, 0.01
_WHAT = """\
How far apart are the log-probabilities of the same tokens under the same weights?

  mprun logprobs MODE MODE ... RUN           in several precision modes, from a run's newest checkpoint
  mprun logprobs MODE MODE ... [key=value]   with fresh weights of this configuration
  mprun logprobs MODE --batch 16,1 RUN       in several batch shapes of one mode

For a language model: forward in eval mode, without gradients, on the first held-out tokens, each
window from its start. Every mode is compared with the first one, and with FP32, which shows which
of two is off. The first MODE may be a training's, the second an inference engine's: then
reinforcement learning takes the ratio for a change of the policy. Writes nothing.
"""  # noqa: E501 - the help page breaks lines
_MORE = """\
A list has a value for each MODE, or one for all; a single MODE is used for every value of a list.

Exit codes: 0 done, 2 bad input, 4 damaged record or checkpoint, 130 interrupted.
"""


class Side(NamedTuple):
    """A computation of the log-probabilities: `batch` windows at a time, `pad` tokens after."""

    mode: str
    batch: int
    pad: int


# Two sides, the first one's distance from the second, and the same by the end of each part.
Row = tuple[Side, Side, "Difference", "dict[int, Difference]"]


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    sides: list[Side] = options.sides
    fp32 = Side("fp32", sides[0].batch, 0)
    wanted = list(dict.fromkeys([*sides, fp32]))
    configs = _configs(options, dict.fromkeys(side.mode for side in wanted))
    found, about = _computed(options, wanted, configs)

    from mprun.extensions.diagnosis.log_probabilities import by_position, difference

    pairs = [(side, sides[0]) for side in sides[1:]]
    pairs += [(side, fp32) for side in sides if fp32 not in (side, sides[0])]
    results: list[Row] = []
    for side, base in pairs:
        both = found[side], found[base], options.band
        results.append((side, base, difference(*both), by_position(*both)))
    rows = [
        {**side._asdict(), "against": base._asdict(), **asdict(whole)}
        | {"positions": [{"up_to": last, **asdict(part)} for last, part in parts.items()]}
        for side, base, whole, parts in results
    ]
    return page(about | {"pairs": rows}, _as_text(about, results), options.json)


def _options(arguments: list[str]) -> Namespace:
    """Parse the options; the words become `sides`, `run` (a path or None) and `overrides`."""
    parser = Arguments("logprobs", _WHAT, _MORE)
    add = parser.add_argument
    add("words", nargs="*", metavar="MODE|RUN|KEY=VALUE", help="see above")
    count = number("--tokens", 1, MAX_STEPS, "a number of tokens", whole=True)
    whole = f"at most so many, in whole windows, at least one ({TOKENS})"
    add("--tokens", type=count, default=TOKENS, metavar="N", help=whole)
    length = number("--window", 1, MAX_STEPS, "a number of tokens", whole=True)
    long = "tokens of a window (as many as the held-out data have)"
    add("--window", type=length, metavar="N", help=long)
    batches = f"windows computed at a time ({BATCH})"
    add("--batch", type=_list("--batch", 1), metavar="N[,N...]", help=batches)
    behind = "padding tokens after each window, not counted (0)"
    add("--pad", type=_list("--pad", 0), metavar="N[,N...]", help=behind)
    within = f"count the tokens whose ratio is not within X of 1 ({BAND:g})"
    add("--band", type=number("--band", 0, 1), default=BAND, metavar="X", help=within)
    softmax = "log-softmax in FP32, or as the mode computes it: in the format of its logits (fp32)"
    add("--log-softmax", choices=["fp32", "mode"], default="fp32", help=softmax)
    add("--json", action="store_true", help="print all results as JSON")
    add(
        "--config-dir",
        metavar="DIR",
        help="folder with your own modes and option files, as for a run",
    )
    options = parser.parse(arguments)
    split_words(options, parser, list(modes(options.config_dir)))
    options.sides = _sides(parser, options.named, options.batch or [BATCH], options.pad or [0])
    return options


def _sides(parser: Arguments, named: list[str], batch: list[int], pad: list[int]) -> list[Side]:
    given = " ".join(named) or "no mode"
    named = named * max(len(batch), len(pad)) if len(named) == 1 else named
    for flag, values in (("--batch", batch), ("--pad", pad)):
        if named and len(values) not in (1, len(named)):
            text = ",".join(map(str, values))
            raise BadInput(
                f"{flag} {text}: must have 1 value, or {len(named)} values (one per mode)"
            )
    sides = [
        Side(mode, batch[place % len(batch)], pad[place % len(pad)])
        for place, mode in enumerate(named)
    ]
    if not sides or sides == [Side("fp32", batch[0], 0)]:
        parser.error(f"{given}: needs two modes, or one beside FP32")
    if len(set(sides)) < len(sides):
        parser.error(f"{given}: a mode is there twice in one shape; use --batch 16,1")
    return sides


def _list(flag: str, low: int) -> Callable[[str], list[int]]:
    one = number(flag, low, MAX_STEPS, "whole numbers, separated by commas,", whole=True)
    return lambda text: [int(one(part)) for part in text.split(",")]


def _configs(options: Namespace, wanted: Iterable[str]) -> dict[str, RunConfig]:
    """Return mode -> the checked configuration in this mode; import no torch."""
    run, own = options.run, options.overrides
    for override in own:
        group = override.lstrip("+~").partition("=")[0].partition(".")[0]
        if group in ("precision", "scaler"):
            raise BadInput(
                f"logprobs {override}: a mode is a single word, as in mprun logprobs amp"
            )
        if group == "resume":
            raise BadInput(
                f"logprobs {override}: is not allowed with a run; pass the run directory alone"
            )
    given = vouched(own, options.config_dir)
    recorded: dict = {}
    if run is not None:
        # Damaged if it is no record, or if a link leads out of the run.
        unfinished(record := record_of("logprobs", run))
        refuse_older_state(f"logprobs {run}", record)
        if not (run / "checkpoints").is_dir():
            hint = "train it with train.checkpoint_every=N"
            raise BadInput(f"logprobs {run}: has no checkpoint; {hint}")
        recorded = read_config(run)
    found = {}
    for mode in wanted:
        chosen = compose_config([*([] if run else own), f"precision={mode}"], options.config_dir)
        config = chosen.config
        if run is not None:
            groups = {group: chosen.as_dict()[group] for group in ("precision", "scaler")}
            config = config_from_record(recorded | {"numerics": {}} | groups, given)
        if (task := task_of(config.model)) != "language_model":
            raise BadInput(
                f"logprobs model={config.model.name}: needs a language model, whose tokens have "
                f"probabilities; the task of this model is {task}"
            )
        found[mode] = config
    return found


def _computed(
    options: Namespace, sides: list[Side], configs: dict[str, RunConfig]
) -> tuple[dict[Side, "Tensor"], dict]:
    """Return log-probabilities of each side, [windows, time], and their source."""
    import torch

    from mprun.extensions.diagnosis.log_probabilities import held_out_windows, log_probs
    from mprun.record import checkpoint
    from mprun.tasks import LanguageModel
    from mprun.training.run import prepare, resolve_device

    run, kept = options.run, None
    if run is not None:
        kept = checkpoint.load_newest(run / "checkpoints", torch.device("cpu"))
        if kept is None:
            raise BadInput(f"logprobs {run}: has no checkpoint")
    found: dict[Side, Tensor] = {}
    products = {}
    # One mode after the other: the flags of FP32 products are process-wide.
    for mode, config in configs.items():
        # On a CPU if the run's GPU is missing here.
        missing = run is not None and config.device == "cuda" and not torch.cuda.is_available()
        built = prepare(config, resolve_device("cpu" if missing else config.device), config.threads)
        with closing(built.data):
            if run is not None and kept is not None:
                _put(built, kept.state, run)
            try:
                windows = held_out_windows(built.data, options.tokens, options.window)
            except ValueError as error:
                raise BadInput(f"--window {options.window}: {error}") from None
            most, length = windows.tokens.shape
            assert isinstance(built.task, LanguageModel)  # what `_configs` has let pass
            context = getattr(built.task.learner.model, "context_length", None)
            for side in (side for side in sides if side.mode == mode):
                if options.batch and side.batch > most:
                    allowed = f"at most {most}, the windows of --tokens {options.tokens}"
                    raise BadInput(f"--batch {side.batch}: must be {allowed}")
                if context is not None and length + side.pad > context:
                    both = f"--window {length} --pad {side.pad}"
                    allowed = f"at most {context}, the model's context"
                    raise BadInput(f"{both}: the sum must be {allowed}, got {length + side.pad}")
                own = options.log_softmax == "mode"
                found[side] = log_probs(built.task, windows, *side[1:], own_format=own)
        unused = built.forward_context.missing()
        if unused and not built.forward_context.overridden:
            raise MprunError(f"precision={mode}: no operation ran in {unused}")
        products[mode] = built.forward_context.kind()
    about = {"run": run and str(run), "step": kept and kept.step, "seed": config.seed}
    about |= {"device": built.device.type, "products": products}
    about |= {"data": built.data.description["name"], "windows": most, "window": length}
    return found, about | {"band": options.band, "log_softmax": options.log_softmax}


def _put(built: "Built", state: dict, run: Path) -> None:
    from mprun.extensions.diagnosis.interventions import transplant

    recorded = read_record(run).get("data", {}).get("sha256")
    if recorded not in (None, built.data.sha256):
        raise BadInput(f"logprobs {run}: the data differ from the data at the start of the run")
    try:
        transplant(built, state["task"])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise Damaged(f"{run / 'checkpoints'}: is not the state of this run ({error})") from error


def _as_text(about: dict, results: "list[Row]") -> list[str]:
    """Return the lines for the console, of 80 columns."""
    sides = [side for row in results for side in row[:2]]
    shaped = len({side[1:] for side in sides}) > 1

    def label(side: Side) -> str:
        shape = f"/{side.batch}{f'+{side.pad}' if side.pad else ''}"
        return f"{side.mode}{shape if shaped else ''}"

    weights = f"{about['run']}, step {about['step']}"
    if about["run"] is None:
        weights = f"fresh, of seed {about['seed']}: they say little about trained ones"
    count = f"{about['windows']} window{'s' * (about['windows'] > 1)}"
    windows = f"{count} of {about['window']}, held out of {about['data']}"
    emulated = any("emulated" in kind for kind in about["products"].values())
    lines = [
        f"weights  {weights}",
        f"tokens   {results[0][2].tokens}: {windows}",
        f"device   {about['device']}{', products below FP32 emulated' if emulated else ''}",
        f"ratio    p(MODE) / p(other); outside: not within {100 * about['band']:g} % of 1",
    ]
    if shaped:
        lines.append("shapes   /N: N windows at a time; +N: N tokens of padding after each")
    width = max(len(label(side)) for side in sides)
    for base in dict.fromkeys(row[1] for row in results):
        rows = [row for row in results if row[1] == base]
        names = ("rms nats", "largest", "mean", "ratio rms", "outside")
        lines += ["", f"against {label(base)}", _row("", width, names, 11)]
        for side, _, one, _ in rows:
            cells = [f"{value:.3g}" for value in (one.rms, one.largest, one.mean)]
            cells += [f"{100 * value:.3g} %" for value in (one.ratio_rms, one.outside)]
            lines.append(_row(label(side), width, cells, 11))
        for side, _, one, _ in rows:
            if one.nonfinite:
                lines.append(f"{label(side)}: {one.nonfinite} of {one.tokens} tokens not finite")
            if side.mode == base.mode or not one.differing:
                lines.append(f"{label(side)}: {one.differing} of {one.tokens} tokens differ")
        if any(side.mode == base.mode for side, *_ in rows) and about["device"] == "cpu":
            lines.append("Sums are in FP32, in the order of this CPU's kernels; a GPU has others.")
    lines += ["", f"rms in nats against {label(results[0][1])}, by position up to"]
    lines.append(_row("", width, results[0][3], 7))
    for side, base, _, parts in results:
        if base == results[0][1]:
            rms = [part.rms for part in parts.values()]
            cells = [f"{value:.1e}".replace("e-0", "e-") if value else "0" for value in rms]
            lines.append(_row(label(side), width, cells, 7))
    return lines


def _row(label: str, width: int, cells: Iterable[object], each: int) -> str:
    return f"{label:<{width}}" + "".join(f"{cell:>{each}}" for cell in cells)
