"""Tell the library what the schema says of recorded keys: `mprun.record.keys.Keys`."""

from collections.abc import Mapping
from typing import Any

from mprun.config.components import NETWORKS
from mprun.config.keys import current as current
from mprun.config.keys import label_of_today as label_of_today
from mprun.config.keys import role_of as role_of
from mprun.config.option_files import modes, option_files, what_it_is
from mprun.config.registry import TaskKind, kind_called, metric_called
from mprun.record.metric_facts import Metric


def metric_of(keys: Mapping[str, Any], name: str) -> Metric | None:
    """Return a metric of the recorded task; of all tasks, if that one is not known or has none."""
    return kind_recorded(keys).metric(name) or metric_called(name)


def networks_in_turn(keys: Mapping[str, Any]) -> int:
    """Return how many networks the recorded task trains in turn: 2 for a GAN."""
    return kind_recorded(keys).networks


def kind_recorded(keys: Mapping[str, Any]) -> TaskKind:
    """Return the registered facts of a record's task, by its `model.name` and `model.task`."""
    network = NETWORKS.get(keys.get("model.name") or "")
    return kind_called((network and network.task) or keys.get("model.task") or "")


def scalers_of_modes() -> dict[str, str]:
    """Return precision mode -> its usual loss scaler, in the order of every table."""
    return {mode.name: mode.scaler for mode in modes().values()}


def experiment(name: str) -> str | None:
    """Return the sentence that describes a shipped experiment; None if there is none."""
    file = option_files("experiment").get(name)
    return None if file is None else what_it_is(file)
