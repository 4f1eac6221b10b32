"""Learning rates against tables worked out by hand from the definitions of their sources."""

import math

import pytest

from mprun.execution.step_runner import Schedule


def rates(total, schedule, lr=1.0, **further):
    return Schedule(lr, schedule, **further).rates(total)


def assert_equal(ours, table):
    # A handful of FP64 operations each.
    assert ours == pytest.approx(table, rel=1e-14, abs=0.0)


@pytest.mark.parametrize(
    ("schedule", "table"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 3 / 4, 1 / 2, 1 / 4]),
        ("cosine", [1, (2 + math.sqrt(2)) / 4, 1 / 2, (2 - math.sqrt(2)) / 4]),
        ("polynomial", [1, 9 / 16, 1 / 4, 1 / 16]),
    ],
)
def test_over_the_whole_run(schedule, table):
    power = {"power": 2.0} if schedule == "polynomial" else {}
    assert_equal(rates(4, schedule, **power), table)
    # In front of it a rise in thirds; the rest of the run is as long as before.
    assert_equal(rates(7, schedule, warmup_updates=3, **power), [1 / 3, 2 / 3, 1, *table])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial"])
def test_the_end_is_final_factor(schedule):
    # Half way: the mean of 1 and 0.2 for the two symmetric ones, 0.2 + 0.8 / 4 for power 2.
    half = 0.4 if schedule == "polynomial" else 0.6
    ours = rates(1000, schedule, final_factor=0.2, power=2.0 if schedule == "polynomial" else 1.0)
    assert ours[500] == pytest.approx(half, rel=1e-14)
    assert 0.2 < ours[-1] < 0.202


def test_step_drops_at_shares_of_the_run():
    ours = rates(8, "step", milestones=(0.25, 0.75), gamma=0.5)
    assert ours == [1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_epoch_decay_is_the_rule_of_ptb_word_lm():
    """Small: max_epoch 4, lr_decay 0.5, 13 epochs; here of 3 steps each.

    ``lr_decay ** max(i + 1 - max_epoch, 0)`` for epoch i = 0, 1, ...: epochs 1 to 4 (i = 0 to 3)
    at the full rate, epoch 5 at half of it.
    """
    ours = rates(39, "epoch_decay", steps_per_epoch=3, constant_epochs=4, gamma=0.5)
    assert ours == [0.5 ** max(i + 1 - 4, 0) for i in range(13) for _ in range(3)]
    assert ours[11] == 1.0 and ours[12] == 0.5 and ours[38] == 0.5**9


@pytest.mark.parametrize(
    ("constant_epochs", "table"),
    [
        (0.0, [0.5, 0.5, 0.25, 0.25, 0.125]),  # the first epoch is past it already
        (0.5, [1, 0.5, 0.5, 0.25, 0.25]),  # drops in the middle of each epoch
        (9.0, [1, 1, 1, 1, 1]),
    ],
)
def test_epoch_decay_from_any_start(constant_epochs, table):
    further = {"steps_per_epoch": 2, "constant_epochs": constant_epochs, "gamma": 0.5}
    assert rates(5, "epoch_decay", **further) == table


def test_warm_up_in_epochs_is_warm_up_in_updates():
    for epochs, updates in ((5.0, 50), (0.25, 2), (0.04, 0)):
        ours = rates(80, "cosine", warmup_epochs=epochs, steps_per_epoch=10)
        assert ours == rates(80, "cosine", warmup_updates=updates)
    # Longer than the run: the rise goes on to the end.
    assert_equal(
        rates(4, "cosine", warmup_epochs=1, steps_per_epoch=8), [1 / 8, 1 / 4, 3 / 8, 1 / 2]
    )
