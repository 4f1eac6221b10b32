"""mprun's components, a module for each family of tasks, and those of other packages.

Importing this registers all of them, in the order in which help lists them.
"""

# isort: off
from mprun.config.components import images, language, gan, custom  # noqa: F401

# isort: on
from mprun.config.registry import COMPONENTS, NETWORKS, SOURCES, TASKS, load_components

__all__ = ["COMPONENTS", "NETWORKS", "SOURCES", "TASKS"]

load_components()
