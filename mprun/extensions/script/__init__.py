"""One's own training script in a precision mode: `mprun.prepare`.

The loop stays plain torch. `prepare` changes what a call of the model computes (prepared_model),
by casts that are nodes of the autograd graph (nodes), and hears of the steps of every optimizer
(steps). Below it are the policies, loss scales and the emulation of `mprun.precision`; the runner
has an engine of its own there, which gives the same bits.
"""

from mprun.extensions.script.prepare import prepare
from mprun.extensions.script.steps import OptimizerSteps, state_of

__all__ = ["OptimizerSteps", "prepare", "state_of"]
