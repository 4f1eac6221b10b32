"""mprun's own components, a chapter for each family of learning, and those of other packages.

Whoever imports this has all of them registered, in the order in which help lists them.
"""

# isort: off
from mprun.config.components import images, language, translation, gan, speech, detection, custom  # noqa: F401

# isort: on
from mprun.config.registry import NETWORKS, SOURCES, TASKS, load_of_others

__all__ = ["NETWORKS", "SOURCES", "TASKS"]

load_of_others()
