"""The step from a checked configuration to a run's objects; no other package reads both."""

from mprun.build.precision import build_loss_scale, policy_from
from mprun.build.run import Built, build

__all__ = ["Built", "build", "build_loss_scale", "policy_from"]
