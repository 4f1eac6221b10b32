"""From a checked configuration to the objects of a run; the only package that reads both."""

from mprun.build.precision import build_loss_scale, policy_from
from mprun.build.run import Built, build

__all__ = ["Built", "build", "build_loss_scale", "policy_from"]
