"""One run from a checked configuration to a finished run directory."""

import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch

from mprun import errors
from mprun.assembly import Built, build
from mprun.config.components import TASKS
from mprun.config.compose import Composed
from mprun.config.execution_rules import engine_of, why_not_on
from mprun.config.registry import shares_streams, task_of
from mprun.config.schema import RunConfig
from mprun.distributed.group import RankGroup, RankLog
from mprun.distributed.rank_info import RankInfo
from mprun.distributed.ranks import ALONE, Ranks
from mprun.errors import BadInput, RankFailed, Resource
from mprun.numerics.probe import chosen_modules
from mprun.numerics.replay import Snapshot
from mprun.precision import pin_math_flags
from mprun.precision.random_states import restore_dropout_state
from mprun.record.keys import config_hash, hash_fields
from mprun.record.memory import card_memory, ran_out, shortage
from mprun.record.metric_facts import Metric, as_record, with_judged
from mprun.record.metrics import TensorBoardView
from mprun.record.run_directory import claim, claim_exactly, locked, refuse_link
from mprun.record.run_record import Record
from mprun.recording.environment import environment, linear_products, number_formats
from mprun.tasks import Task
from mprun.torch_private import DYNAMO
from mprun.training import announcements
from mprun.training.loop import BEGINNING, Loop, Start
from mprun.training.signals import Interruption


def import_all() -> None:
    """Import what runs import late, too: what the first optimizer needs, and TensorBoard."""
    for module in (DYNAMO, "torch.utils.tensorboard"):
        import_module(module)


def start(composed: Composed, rank_info: RankInfo | None = None) -> int:
    """Run a new configuration; return the exit code. It writes nothing if it raises BadInput.

    rank_info: rank_info of this process among the ranks of the run; None: it is the only one.
    """
    config = placed(composed.config, rank_info)
    composed = replace(composed, config=config)
    device = resolve_device(config.device)
    ranks = joined(config, device, rank_info)

    def begun() -> Built:
        built = prepare(config, device, config.threads, ranks)
        metrics_of(config, built.task)
        with _memory_as_resource(config):
            _check_data(built)
            if config.deterministic and device.type == "cuda":
                _check_determinism(built)
        return built

    made: list[Path] = []

    def claimed_by_first() -> str:
        if not ranks.is_first:
            return ""
        made.append(claimed(composed))
        return str(made[0])

    try:
        with ranks.watched():
            built = ranks.together(begun)
            ranks.together(lambda: check_same_products(built))
            ranks.together(lambda: _check_same_data(built))
            directory = Path(ranks.first(ranks.together(claimed_by_first)))
        ranks.found(directory)
        if not ranks.is_first:
            return follow(directory, config, built)
        with locked(directory, new=True):
            announcements.say(*announcements.notes(config, built))
            return attempt(config, built, new_record(directory, composed))
    except BaseException:
        for path in made:
            with suppress(OSError):  # what is not empty is a run
                path.rmdir()
        raise


def placed(config: RunConfig, rank_info: RankInfo | None) -> RunConfig:
    """Return the configuration with the devices and machines that the run really has."""
    if rank_info is not None:
        return replace(config, devices=str(rank_info.devices), nodes=rank_info.nodes)
    return replace(config, devices="1") if config.devices == "auto" else config


def joined(config: RunConfig, device: torch.device, rank_info: RankInfo | None) -> Ranks:
    """Wait for all ranks of a run and return this one.

    config: as it is `placed`.

    Raises:
        BadInput: the configuration cannot be divided among so many ranks, or the ranks' differ.
        Resource: the ranks do not meet.
    """
    if rank_info is None:
        return ALONE
    for line in why_not_on(config, rank_info.world):
        raise BadInput(line)
    ranks = RankGroup(rank_info, device, config.dist.timeout_s)
    with ranks.watched():
        if len(set(ranks.all_of(config_hash(asdict(config))))) > 1:
            raise BadInput(
                f"rank {ranks.rank}: the ranks have different configurations: check their "
                "overrides, option files and versions"
            )
    return ranks


def _check_same_data(built: Built) -> None:
    """Raise BadInput if this rank has other data than rank 0."""
    own = built.data.sha256
    if built.task.ranks.first(own) != own:
        must = "each rank must be given all of them, and a stream must not divide itself"
        raise BadInput(f"the data differ from those of rank 0: {must} (mprun --help data.factory)")


def check_same_products(built: Built) -> None:
    """Raise BadInput if linear layers of this rank multiply in another way than those of rank 0.

    Codes and decoded numbers have sums in different orders; each GPU decides by its own check.
    """
    operands = linear_products(built.forward_context)
    if (of_first := built.task.ranks.first(operands)) != operands:
        raise BadInput(
            f"precision={built.policy.name}: on this rank linear layers multiply {operands}, but "
            f"on rank 0 {of_first}; all ranks need the same kind of GPU"
        )


def follow(directory: Path, config: RunConfig, built: Built, start: Start = BEGINNING) -> int:
    """Train as a rank that records nothing; return the exit code.

    Its output goes to `ranks/` of the run's directory, and stays there unless all went well.
    """
    log, code = RankLog(directory, built.task.ranks.rank), errors.BUG
    try:
        with (
            Interruption() as stop,
            TemporaryDirectory(prefix="mprun-") as own,
            _used(built, config),
        ):
            code = Loop(built, config, Path(own), stop, start).train().exit_code
        built.task.ranks.leave(code)
        return code
    finally:
        # After a regular end run.json and rank 0's console already tell everything.
        regular = (errors.DONE, errors.DIVERGED, errors.PREEMPTED, errors.INTERRUPTED)
        log.close(keep=code not in regular)


@contextmanager
def _used(built: Built, config: RunConfig) -> Iterator[None]:
    """Enclose the training of what was built; other ranks, if any, hear of an error inside."""
    alone = built.task.ranks.world == 1
    with closing(built.data), built.stepper.on_stream(), built.task.ranks.watched():
        with nullcontext() if alone else _memory_as_resource(config):
            yield


def claimed(composed: Composed, named: tuple[str, ...] | None = None, prefix: str = "") -> Path:
    """Make the directory of a run: output_dir, or one named after the overrides in `named`."""
    if composed.config.output_dir is not None:
        return claim_exactly(Path(composed.config.output_dir))
    place = composed.place(named=named)
    return claim(refuse_link(place.parent), prefix + place.name)


def metrics_of(config: RunConfig, task: Task) -> dict[str, Metric]:
    """Return name -> metric of a run's evaluations; BadInput if nobody declares the judged one."""
    name = task_of(config.model)
    declared: object = task.metrics  # of a user's class it may be anything
    several = isinstance(declared, tuple | list)
    if not several or not all(isinstance(metric, Metric) for metric in task.metrics):
        raise BadInput(f"model.task={name}: metrics must be a tuple of mprun.Metric")
    closed = name in TASKS
    return with_judged(task.metrics, config.compare, name, config.data.name, closed=closed)


def new_record(directory: Path, composed: Composed) -> Record:
    """Return the record of a run that has not begun."""
    return Record.new(
        directory,
        choices=composed.choices,
        overrides=list(composed.overrides),
        **hash_fields(composed.as_dict()),
        precision={"mode": composed.mode, "usual_scaler": composed.usual_scaler},
    )


def _check_data(built: Built) -> None:
    """Read the first batch of a source that reads ahead, before anything is written."""
    if built.data.defer_wait is not None:
        try:
            built.data.train_batch(built.task.numbers[0])
        except BaseException:
            built.data.close()
            raise


def _check_determinism(built: Built) -> None:
    """Take a step and undo it: only a kernel itself reports that it is not deterministic.

    Costs a step, and meanwhile the memory of a second state.
    """
    before = Snapshot(built.task, built.device)
    before.take(0, 0)
    try:
        with built.stepper.on_stream():
            built.task.train_step(0)
    except RuntimeError as error:
        if "deterministic" in str(error):
            raise BadInput(_nondeterministic(error)) from error
        raise
    before.restore()


def _nondeterministic(error: BaseException) -> str:
    return f"deterministic=true: {str(error).partition(', but you set')[0]}"


def prepare(
    config: RunConfig, device: torch.device, threads: int | None, ranks: Ranks = ALONE
) -> Built:
    """Pin flags, seed every generator and build the run; write no file.

    Raises BadInput if the configuration cannot be built, Resource if memory does not suffice.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    autotune = {"auto": None, "on": True, "off": False}[config.train.autotune]
    pin_math_flags(config.precision.fp32_math, config.deterministic, autotune)
    random.seed(config.seed)
    numpy.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    if device.type == "cuda":
        restore_dropout_state(None, device)
    # torch warns that its CPU library has no LSTM with projection; ours is emulated or slower.
    warnings.filterwarnings("ignore", message="LSTM with projections")
    with _memory_as_resource(config):
        built = build(config, device, ranks)
    if config.numerics.probes:
        chosen_modules(built.task.learners, config.numerics.modules)
    return built


def attempt(config: RunConfig, built: Built, record: Record, start: Start = BEGINNING) -> int:
    """Train from `start` on and keep run.json true whatever happens; return the exit code."""
    with Interruption() as interruption:
        directory, task = record.directory, built.task
        earlier = record.get("data", {})  # from the attempt before this one
        switched = built.stepper.entered_by(start.step)
        numbers: dict[str, Any] = {}  # after a switch the record has those of the first mode
        if not switched:
            numbers = number_formats(task.learners, built.forward_context, config.scaler.name)
        record.begin(
            asdict(config),
            steps=built.steps,
            steps_per_epoch=task.steps_per_epoch,
            sample=task.sample,
            samples_per_step=task.samples_per_step,
            # It has the mode's name; the mode's file may be gone by now.
            precision=record["precision"] | numbers,
            data={"sha256": built.data.sha256, **built.data.description},
            metrics=as_record(metrics_of(config, task), config.data.name),
            environment=environment(built.device),
            ranks=_described(config, built),
            launched_by=task.ranks.launched_by,
            switched=switched,
            # The rest is known at the end; a resumed run reads this.
        )
        if task.ranks.world > 1:
            task.ranks.found(directory)
        announcements.announce(directory, config, built, record, start.step)

        def end(status: str, cause: str | None, results: dict | None = None, **more: int) -> None:
            task.ranks.ends_by(lambda cause, code: None)
            record.end(
                status,
                cause,
                results,
                **more,
                data=record["data"] | announcements.replaced(built.data, earlier),
                execution=built.stepper.description,
                audit=built.stepper.audit_result(),
            )

        last = start.step
        # Of a process that is ended while its main thread waits, which may hold the device.
        task.ranks.ends_by(lambda cause, code: record.end("failed", cause, exit_code=code))
        try:
            with _used(built, config):
                noted = record.checkpointed, record.switched
                loop = Loop(built, config, directory, interruption, start, *noted)
                try:
                    outcome = loop.train()
                finally:
                    last = loop.outcome.step
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)  # a second SIGINT, or one between steps
            told = _told(error, config, directory)
            with suppress(OSError):  # on a full disk, report the first error
                plain = stopped or isinstance(error, RankFailed)
                cause = str(error) if plain else f"{type(error).__name__}: {error}"
                status = "preempted" if stopped else "failed"
                end(status, cause, last_step=last, exit_code=errors.exit_code_of(told))
            with suppress(Exception):  # nothing may take the place of the error
                announcements.say(announcements.what_fits(directory, record))
            announcements.say(announcements.replaced_line(record["data"]))
            _print_directory(directory)
            if told is error:
                raise
            raise told from error
        results = outcome.results() | {"emulated": built.forward_context.rerouted()}
        interruption.settle()
        end(outcome.status, outcome.cause, results, exit_code=outcome.exit_code)
        if outcome.status != "preempted":
            _write_hyperparameters(directory, config, record)
        announcements.say_ending(directory, built.data, outcome, record)
        _print_directory(directory)
        task.ranks.leave(outcome.exit_code)
        return outcome.exit_code


def _told(error: BaseException, config: RunConfig, directory: Path) -> BaseException:
    """Return the error that the command ends with, for one that ended the training."""
    if config.deterministic and "deterministic" in str(error):
        return BadInput(_nondeterministic(error))
    if isinstance(error, OSError):
        return Resource(f"{error.strerror or error} ({error.filename or directory})")
    return _of_memory(error, config) or error


def _print_directory(directory: Path) -> None:
    try:
        print(f"run: {directory}", flush=True)
    except OSError:  # a closed stdout does not fail the run
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes stdout at exit


def _described(config: RunConfig, built: Built) -> dict | None:
    """Return run.json's entry for the ranks, None for a single one."""
    ranks = built.task.ranks
    if ranks.world == 1:
        return None
    engine, reason = engine_of(config, built.device.type)
    return {
        "world": ranks.world,
        "nodes": config.nodes,
        **ranks.description(),
        "engine": engine,
        **({"why_not_ddp": reason} if reason else {}),
        "order": config.dist.order,
        "reduce_dtype": config.precision.reduce_dtype or config.precision.grad_dtype,
    }


@contextmanager
def _memory_as_resource(config: RunConfig) -> Iterator[None]:
    """Turn errors of exhausted memory into a one-line Resource that tells what may fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (told := _of_memory(error, config)) is None:
            raise
        raise told from error


def _of_memory(error: BaseException, config: RunConfig) -> Resource | None:
    return Resource(f"{shortage(error)}; {_smaller(config)}") if ran_out(error) else None


def _smaller(config: RunConfig) -> str:
    """Return what takes less memory than this configuration."""
    half, accumulate = config.data.batch_size // 2, config.train.accumulate
    precision = config.precision
    less = []
    if half:
        more = "" if shares_streams(config.model) else f" train.accumulate={2 * accumulate}"
        less.append(f"data.batch_size={half}{more}")
    in_fp32 = precision.param_dtype == "fp32" and not precision.autocast_dtype
    if in_fp32 and card_memory()[1] > 0:
        less.append("precision=amp")
    return f"try {' or '.join(less or ['a smaller model'])}"


def resolve_device(name: str) -> torch.device:
    """Return the device of `auto`, `cuda` or `cpu`; raise BadInput if CUDA is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("device=cuda: torch sees no CUDA device here; use device=cpu or auto")
    return torch.device(name)


def _write_hyperparameters(directory: Path, config: RunConfig, record: dict) -> None:
    # Five values: TensorBoard's table shows only its first five columns.
    values = {"lr": config.optim.lr, "model": str(record["choices"].get("model"))}
    values |= {"precision": record["precision"]["mode"], "scaler": config.scaler.name}
    values["seed"] = config.seed
    final = record["final"] or ("loss",)  # diverged before its evaluation
    view = TensorBoardView(directory)
    view.hyperparameters(values, [*(f"eval/{metric}" for metric in final), "train/skipped"])
    view.close()
