"""What is learned and how: a file a task; `Task` says what a task has to offer."""

from mprun.tasks.classification import Classification
from mprun.tasks.gan import GAN
from mprun.tasks.language_model import LanguageModel
from mprun.tasks.reconstruction import Reconstruction
from mprun.tasks.sample_distance import SampleDistance
from mprun.tasks.task import Learner, Task

__all__ = [
    "GAN",
    "Classification",
    "LanguageModel",
    "Learner",
    "Reconstruction",
    "SampleDistance",
    "Task",
]
