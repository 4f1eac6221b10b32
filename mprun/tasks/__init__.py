"""The learning tasks; `Task` is their interface."""

from mprun.tasks.gan import GAN as GAN
from mprun.tasks.learner import Learner as Learner
from mprun.tasks.learner import OfParameters as OfParameters
from mprun.tasks.sample_distance import SampleDistance as SampleDistance
from mprun.tasks.supervised import Classification as Classification
from mprun.tasks.supervised import LanguageModel as LanguageModel
from mprun.tasks.supervised import Reconstruction as Reconstruction
from mprun.tasks.task import Task as Task
