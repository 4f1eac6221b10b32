"""A user's training script in a precision mode: `mprun.prepare`, `mprun.switch`.

The loop stays plain torch. `prepare` changes the computation of a model's calls (prepared_model) by
casts that are nodes of the autograd graph (nodes). It follows every optimizer's steps (steps). It
uses the policies, loss scales and emulation of `mprun.precision`.
"""

from mprun.prepared.optimizers import state_of
from mprun.prepared.prepare import prepare, switch
from mprun.prepared.steps import OptimizerSteps

__all__ = ["OptimizerSteps", "prepare", "state_of", "switch"]
