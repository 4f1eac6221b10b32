"""The line before a sweep on the margins that its seeds could show."""

import pytest

from mprun.comparison.foresight import stated_scatter
from mprun.comparison.looks import spent_alphas
from mprun.record.metric_facts import stated
from mprun.sweeps.foresight import foresight
from mprun.sweeps.plan import plan

from ..helpers import LM
from .test_until import UNTIL, end

TWO = "precision=fp32,amp"
SMALL = [*LM, "compare.margin=0.02"]


@pytest.mark.slow
def test_it_tells_the_half_widths_by_the_scatter_of_earlier_runs():
    assert foresight(plan([*SMALL, TWO, "seed=0,1,2"], None)) is None  # nothing is known
    for cell in plan([*SMALL, "precision=fp32,fp16_naive,amp", "seed=0,1,2,3,4"], None).cells:
        end(cell)
    # fp16_naive: s = 0.0255 of 2.08, by hand 1.2 %; t(.95, 2) * 1.2 / sqrt(3) = 2.1, and
    # t(.95, 9) * 1.2 / sqrt(10) = 0.71. amp scatters 36 times less.
    wide = "precision=fp32,fp16_naive,amp"
    line = foresight(plan([*SMALL, wide, "seed=7,8,9"], None))
    says = "3 seeds: margins from ±{} % could be shown with the scatter of 5 earlier seeds of {}; "
    assert line == says.format("2.1", "fp16_naive") + "10 seeds: ±0.71 %"
    line = foresight(plan([*SMALL, TWO, "seed=7,8,9"], None))
    assert line == says.format("0.057", "amp") + "10 seeds: ±0.020 %"
    # At the alphas of the first and the last look: t(1 - .0232, 2) = 4.46 in place of 2.92.
    first, last = (spent_alphas(3, 5)[place] for place in (0, -1))
    assert (first, last) == pytest.approx((0.0232, 0.0273), abs=0.0003)
    line = foresight(plan([*SMALL, TWO, *UNTIL, "seed=7"], None))
    assert line == says.format("0.088", "amp") + "5 seeds: ±0.041 %"
    # Two seeds show nothing; runs of another configuration, or of one mode alone, tell nothing.
    assert foresight(plan([*SMALL, TWO, "seed=7,8"], None)).startswith("3 seeds: ")
    assert foresight(plan([*SMALL, TWO, "optim.lr=0.3", "seed=7,8,9"], None)) is None
    assert foresight(plan([*SMALL, "precision=amp", "seed=7,8,9"], None)) is None


def test_it_tells_them_by_a_stated_scatter():
    # t(.95, 2) * 0.06 / sqrt(3) = 2.920 * 0.0346 = 0.101; t(.95, 9) * 0.06 / sqrt(10) = 0.0348.
    looks = [(3, 0.05), (10, 0.05)]
    line = "3 seeds: margins from ±0.10 % could be shown with a scatter of 0.060 %; 10 seeds: ±0"
    assert stated_scatter(0.0006, stated("loss", False), looks) == line + ".035 %"
    points = stated_scatter(0.2, stated("top1", True), looks[:1])
    assert points.startswith("3 seeds: margins from ±0.34")
