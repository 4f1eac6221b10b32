"""The learning tasks; `Task` is their interface."""

from mprun.tasks.gan import GAN
from mprun.tasks.sample_distance import SampleDistance
from mprun.tasks.supervised import Classification, LanguageModel, Reconstruction
from mprun.tasks.task import BatchStatistics, Task, TrainState

__all__ = [
    "GAN",
    "BatchStatistics",
    "Classification",
    "LanguageModel",
    "TrainState",
    "Reconstruction",
    "SampleDistance",
    "Task",
]
