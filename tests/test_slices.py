"""``pytest --slice K/N``, ``few``: every test is in one slice, each value in the default run."""

import pytest

from . import conftest

pytest_plugins = ["pytester"]


@pytest.fixture
def collected(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # nine tenths of the time
    pytester.makeini("[pytest]\nmarkers = slow\n few")
    pytester.makepyfile("""
        import pytest

        @pytest.mark.parametrize("n", range(40))
        @pytest.mark.slow
        def test_slow(n): pass

        @pytest.mark.parametrize("n", range(3))
        @pytest.mark.parametrize(("a", "b"), [(0, 1), (2, 3), (4, 5), (6, 7)])
        @pytest.mark.few
        def test_quick(n, a, b): pass
    """)

    def collect(*arguments):
        run = pytester.inline_run("--collect-only", *arguments, plugins=[conftest])
        (finished,) = run.getcalls("pytest_collection_finish")
        return [item.nodeid.partition("::")[2] for item in finished.session.items]

    return collect


@pytest.mark.slow
def test_every_slow_test_is_in_one_slice(collected):
    everything = collected("-m", "slow")
    slices = [collected("-m", "slow", "--slice", f"{k}/8") for k in range(1, 9)]
    assert len(everything) == 48 and all(slices)
    assert sorted(sum(slices, [])) == sorted(everything)


@pytest.mark.slow
def test_a_test_stays_in_its_slice_when_others_go(collected):
    first, *others = collected("-m", "slow", "--slice", "8/8")
    deselected = f"test_a_test_stays_in_its_slice_when_others_go.py::{first}"
    assert collected("-m", "slow", "--slice", "8/8", "--deselect", deselected) == others


def test_few_of_a_product_show_each_value_once(collected):
    cases = [one.removeprefix("test_quick[").rstrip("]").split("-") for one in collected()]
    assert sorted({a + b for a, b, _ in cases}) == ["01", "23", "45", "67"]
    assert {n for *_, n in cases} == {"0", "1", "2"} and len(cases) == 4
