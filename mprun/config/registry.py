"""Components: the parts of a run, each registered in one place with all its facts.

A component names its builder as text, `module:attribute`. So code that only reads its keys imports
no torch. The decorators build the configuration class, always slotted: OmegaConf sets attributes,
and only a slotted class refuses `+group.unknown=1`.

mprun's components are in `mprun.config.components`. Another package adds components through an
entry point of the group `mprun.components`, which names a module that registers them. Its option
files are in a folder `conf` beside that module (docs/extend.md).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, make_dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import MISSING

from mprun.config.fields import count, place, ranged, setting
from mprun.entry_points import announced
from mprun.errors import BadInput, raised
from mprun.record.keys import READING
from mprun.record.metric_facts import LOSS, Metric

# A rule yields the lines that refuse a configuration: (the component's part of it, all of it).
Rule = Callable[[Any, Any], Iterator[str]]
GROUP = "mprun.components"
# Folders of option files beside the modules of other packages.
FOLDERS: list[Path] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """The registered facts of a part of a run; alone those of a precision mode."""

    name: str
    config: type  # its configuration class
    # `module:attribute` of a function that builds it from the fields of the same name. A mode's
    # takes its name and its values, and returns a `PrecisionPolicy`.
    builder: Any = ""
    rules: tuple[Rule, ...] = ()  # that only concern it, beside the ranges of its fields
    own: bool = False  # it is the user's code, about which nothing is known


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule(Component):
    """An optimizer, or a rule of the loss scale: of the keys of its group it reads some alone."""

    needs: tuple[str, ...] = ()  # those that must be set
    takes: tuple[str, ...] = ()  # those that may be null
    of_matrices: bool = False  # an optimizer that moves hidden matrices as wholes

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys that it reads and others do not."""
        return self.needs + self.takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Network(Component):
    """A network; it has a builder for each one trained in turn, or for each `variant`."""

    task: str | None  # None: its configuration has it, in `task`
    # Sizes that it takes from the data beside its configuration. A configuration field of that
    # name takes precedence, and must be at least the data's value.
    needs: tuple[str, ...] = ()
    recurrent: bool = False  # it has LSTM or GRU layers
    # It generates images in [-1, 1], of `model.image_size`, and takes such images.
    in_tanh: bool = False
    # A language model's state goes on from window to window. False: there is none, so that ranks
    # share out micro-batches instead of streams.
    carries_state: bool = True
    zero_state: bool = False  # what it carries on starts as zeros, or there is nothing
    why_no_graph: str | None = None  # the reason why its steps cannot be a CUDA graph
    # Name of its list of blocks, each of which is called once in a pass.
    blocks: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource(Component):
    family: str  # images, boxes (images with objects in them), text, utterances, sentence_pairs
    on_disk: bool = False  # its files are below `data.root`
    decodes: bool = False  # loader processes decode its files during training
    several_shapes: bool = False  # its batches differ in shape
    num_classes: int | None = None  # if known without its files
    most_boxes: int = 0  # largest number of objects in an image
    shapes: str = ""  # `module:attribute` of the shapes of its batches


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskKind:
    """A task that can be learned."""

    name: str
    builder: str  # `module:attribute` of its class
    metrics: tuple[Metric, ...]  # of its evaluation
    judged: str = "loss"  # the metric of a verdict if none is set
    family: str = "images"  # the kind of data that it learns from
    network_kind: str = ""  # in words, for messages
    sizes: tuple[str, ...] = ()  # that its data source must know
    networks: int = 1  # trained in turn, each with an optimizer
    streams: bool = False  # a batch is a piece of each of several streams, which may have a state
    overlaps: bool = False  # gradients can be summed over ranks during the backward pass
    of_own_networks: bool = False  # a user's network can learn it by its name

    def __post_init__(self) -> None:
        if not all(isinstance(metric, Metric) for metric in self.metrics):
            raise TypeError(f"task {self.name}: every metric must be a mprun.Metric")
        if self.metric(self.judged) is None:
            raise ValueError(f"task {self.name}: judged={self.judged!r} must be one of its metrics")

    def metric(self, name: str) -> Metric | None:
        """Return the metric of that name; None if the task does not declare it."""
        return next((metric for metric in self.metrics if metric.name == name), None)


@dataclass(slots=True)
class ModelConfig:
    """The base of the configurations of networks; `component` has a network's registered facts."""

    component: ClassVar[Network] = Network(name="", config=object, task="")
    name: str = setting(MISSING, "Network to build; model=OPTION sets it")

    @property
    def carries_state(self) -> bool:
        return self.component.carries_state

    @property
    def why_no_graph(self) -> str | None:
        return self.component.why_no_graph


@dataclass(slots=True)
class DataConfig:
    """The base of the configurations of data; `component` has a source's registered facts."""

    component: ClassVar[DataSource] = DataSource(name="", config=object, family="")
    name: str = setting(MISSING, "Data source to build; data=OPTION sets it")
    root: str | None = place(
        "Folder that contains the data files; null: embedded or synthetic data"
    )
    batch_size: int = count(
        32, "Number of samples (for text: streams) in a micro-batch, on one device"
    )
    workers: int | None = ranged(
        None,
        "Number of loader processes; null: chosen by mprun if files are decoded, otherwise 0",
        at_least=0,
        at_most=256,
        role=READING,
    )


# Name -> component; complete once `mprun.config.components` is imported.
NETWORKS: dict[str, Network] = {}
SOURCES: dict[str, DataSource] = {}
OPTIMIZERS: dict[str, UpdateRule] = {}
MODES: dict[str, Component] = {}  # most modes are option files alone
SCALERS: dict[str, UpdateRule] = {}
TASKS: dict[str, TaskKind] = {}
# Group -> its components, and the key that names one of them.
COMPONENTS: dict[str, tuple[dict[str, Any], str]] = {
    "model": (NETWORKS, "name"),
    "data": (SOURCES, "name"),
    "optim": (OPTIMIZERS, "name"),
    "precision": (MODES, "name"),
    "scaler": (SCALERS, "kind"),
}


def task_of(model: Any) -> str:
    """Return the task of a configured network: a name of `TASKS`, or a class of the user's."""
    registered: str | None = model.component.task
    return model.task if registered is None else registered


def kind_of(model: ModelConfig) -> TaskKind:
    """Return the registered facts of a configured network's task."""
    return kind_called(task_of(model))


def shares_streams(model: ModelConfig) -> bool:
    """Return whether ranks share out the streams of every batch: their state is carried on."""
    return kind_of(model).streams and model.carries_state


def kind_called(name: str) -> TaskKind:
    """Return the registered facts of a task; defaults for a user's class, which has a loss."""
    return TASKS.get(name) or TaskKind(name=name, builder=name, metrics=(LOSS,))


def metric_called(name: str) -> Metric | None:
    """Return the metric of that name of all registered tasks; None without one, or if they differ.

    A record of an earlier version names its metrics alone.
    """
    found = {metric for kind in TASKS.values() for metric in kind.metrics if metric.name == name}
    return found.pop() if len(found) == 1 else None


def readers_of(group: str, key: str) -> list[str]:
    """Return the update rules of a group that read a key; none: all do, or none has it."""
    table, _ = COMPONENTS.get(group, ({}, ""))
    return [name for name, one in table.items() if key in getattr(one, "reads", ())]


def _registered(group: str, kind: Any, name: str, **facts: Any) -> Any:
    """Return a decorator that makes and registers a class; update rules share one made before."""
    table, key = COMPONENTS[group]

    def decorate(cls: Any) -> Any:
        if kind is UpdateRule and "__dataclass_fields__" in vars(cls):
            _add(table, kind(name=name, config=cls, **facts))
            return cls
        own = (key, str, setting(name, cls.__dataclass_fields__[key].metadata["doc"]))
        bases = (dataclass(slots=True)(cls),)
        made: Any = make_dataclass(cls.__name__, [own], bases=bases, slots=True)
        made.__module__, made.__doc__ = cls.__module__, cls.__doc__
        if hasattr(object.__new__(made), "__dict__"):
            raise TypeError(
                f"{name}: all base classes of {cls.__name__} must be @dataclass(slots=True)"
            )
        made.component = kind(name=name, config=made, **facts)
        _add(table, made.component)
        return made

    return decorate


# Each takes a name and the attributes of the class of facts, and decorates a configuration: a
# `ModelConfig`, `DataConfig`, `OptimConfig`, `ScalerConfig` or `PrecisionConfig`. The builder of an
# optimizer takes groups of parameters first, that of a scaler `device` too.
network = partial(_registered, "model", Network)
source = partial(_registered, "data", DataSource)
optimizer = partial(_registered, "optim", UpdateRule)
scaler = partial(_registered, "scaler", UpdateRule)
precision = partial(_registered, "precision", Component, builder="mprun.precision:build_policy")


def task(name: str, **facts: Any) -> None:
    """Register a task; facts: the attributes of `TaskKind`."""
    _add(TASKS, TaskKind(name=name, **facts))


def _add(table: dict[str, Any], component: Any) -> None:
    if component.name in table:
        raise ValueError(f"two components are called {component.name}")
    table[component.name] = component


def load_components() -> None:
    """Import the modules that entry points of the group name; they register what they have.

    Raises:
        BadInput: a module that cannot be imported, with the entry point's name.
    """
    for name, module in announced(GROUP).items():
        try:
            file = import_module(module).__file__
        except Exception as error:
            raise BadInput(f"entry point {GROUP} {name}: {raised(error)}") from error
        if file and (folder := Path(file).parent / "conf").is_dir():
            FOLDERS.append(folder)
