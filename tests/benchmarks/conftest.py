"""The tests of benchmarks/ share its modules, and contenders on tiny models."""

import importlib
from pathlib import Path

import pytest

from .peer_cases import make_peer, tiny_network  # noqa: F401


@pytest.fixture
def module(monkeypatch):
    """``module("fidelity.ulp")``, as the scripts in benchmarks/ import it."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module
