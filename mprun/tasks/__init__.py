"""What is learned and how: each task owns model, optimizer, data and a step to read through.

A task has `train_step(step, measure)` -> 0-dim device tensors by metric name (always `loss` and
`loss_scale`; `found_inf` where updates can be skipped), which is `compute(load(step), measure)`:
`load` decides on the host, `compute` works on the device alone. Further `evaluate()` -> floats,
`state_dict` and `load_state_dict`, `learners` and `loss_scales` by name, `samples_per_step`,
`steps_per_epoch` and `sample`, the unit of throughput.
"""

from mprun.tasks.classification import Classification
from mprun.tasks.gan import GAN
from mprun.tasks.language_model import LanguageModel
from mprun.tasks.reconstruction import Reconstruction
from mprun.tasks.sample_distance import SampleDistance
from mprun.tasks.train_state import Learner

__all__ = [
    "GAN",
    "Classification",
    "LanguageModel",
    "Learner",
    "Reconstruction",
    "SampleDistance",
]
