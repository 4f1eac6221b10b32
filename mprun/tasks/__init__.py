"""What is learned and how; `Task` says what a task has to offer."""

from mprun.tasks.detection import Detection
from mprun.tasks.gan import GAN
from mprun.tasks.sample_distance import SampleDistance
from mprun.tasks.speech import Speech
from mprun.tasks.supervised import Classification, LanguageModel, Reconstruction
from mprun.tasks.task import BatchStatistics, Task, TrainState
from mprun.tasks.translation import Translation

__all__ = [
    "GAN",
    "BatchStatistics",
    "Classification",
    "Detection",
    "LanguageModel",
    "TrainState",
    "Reconstruction",
    "SampleDistance",
    "Speech",
    "Task",
    "Translation",
]
