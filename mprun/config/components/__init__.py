"""The core's components, a chapter for each family of learning, and those of extensions and others.

Whoever imports this has all of them registered, in the order in which help lists them.
"""

# isort: off
from mprun.config.components import images, language, gan, custom  # noqa: F401

# isort: on
from mprun.config.registry import NETWORKS, SOURCES, TASKS, load_components

__all__ = ["NETWORKS", "SOURCES", "TASKS"]

load_components()
