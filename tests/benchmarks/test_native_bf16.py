"""`benchmarks.native_bf16` reports measured steps."""

import pytest

from benchmarks.native_bf16 import CASES, page, tables
from benchmarks.suite.models import NATIVE_SUITE
from mprun.extensions.bench.cases import Case
from mprun.extensions.bench.runner import compiles


def rows(own_ms):
    """Ten rounds of each contender: mprun takes `own_ms`, compiled a tenth more, peers 100 ms."""
    found = []
    for mode, name in CASES:
        base = {"mprun": own_ms, "mprun+": 1.1 * own_ms}.get(name, 100.0)
        times = [base + number % 3 for number in range(10)]
        row = {"label": "toy", "mode": mode, "contender": name, "losses": [1.0] * 6}
        found.append(row | {"step_ms": times})
    return found


@pytest.mark.parametrize(
    ("own_ms", "verdict", "slower"), [(80.0, "faster", 0), (100.0, "even", 0), (120.0, "slower", 3)]
)
def test_the_fastest_of_mprun_is_judged_by_the_whole_interval(own_ms, verdict, slower):
    _, best, found = tables(rows(own_ms))
    assert best.count(f"| {verdict}") == 3 and len(found) == slower
    assert best.count("| mprun ") == 3  # the compiled one is slower
    about = dict.fromkeys(("date", "machine", "torch", "python", "this", "command"), "x")
    assert best in page(about, rows(own_ms), 10)


def test_the_five_networks_with_what_compiles_there():
    labels = [group.label.split()[0] for group in NATIVE_SUITE]
    assert labels == ["GPT", "DCGAN", "bigLSTM", "AlexNet", "ResNet-50"]
    for group in NATIVE_SUITE:
        config = Case("", (*group.overrides, "cpu_half=native"), "amp_bf16", "mprun").config()
        assert compiles(config, "cpu") == (not group.label.startswith("bigLSTM"))
