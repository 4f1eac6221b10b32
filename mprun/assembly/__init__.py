"""The step from a checked configuration to a run's objects; no other package reads both."""

from mprun.assembly.precision import build_loss_scale, policy_from
from mprun.assembly.run import Built, build

__all__ = ["Built", "build", "build_loss_scale", "policy_from"]
