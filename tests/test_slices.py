"""``pytest --slice K/N``: every test is in one slice, whichever others there are."""

import pytest

from . import conftest

pytest_plugins = ["pytester"]


@pytest.fixture
def collected(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # nine tenths of the time
    pytester.makeini("[pytest]\nmarkers = slow")
    pytester.makepyfile("""
        import pytest

        @pytest.mark.parametrize("n", range(40))
        @pytest.mark.slow
        def test_slow(n): pass

        def test_quick(): pass
    """)

    def collect(*arguments):
        run = pytester.inline_run("--collect-only", *arguments, plugins=[conftest])
        (finished,) = run.getcalls("pytest_collection_finish")
        return [item.nodeid for item in finished.session.items]

    return collect


def test_every_slow_test_is_in_one_slice(collected):
    everything = collected("-m", "slow")
    slices = [collected("-m", "slow", "--slice", f"{k}/8") for k in range(1, 9)]
    assert len(everything) == 40 and all(slices)
    assert sorted(sum(slices, [])) == sorted(everything)


def test_a_test_stays_in_its_slice_when_others_go(collected):
    first, *others = collected("-m", "slow", "--slice", "8/8")
    assert collected("-m", "slow", "--slice", "8/8", "--deselect", first) == others
