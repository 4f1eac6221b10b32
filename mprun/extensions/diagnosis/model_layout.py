"""Name a model's modules in their order, and those that multiply or normalise."""

from dataclasses import dataclass

from torch import nn

from mprun.precision.module_dtypes import NORM_LAYERS

Key = tuple[str, str]  # learner, module
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PRODUCTS = (nn.Linear, nn.RNNBase, *_CONVOLUTIONS, *_TRANSPOSED)


@dataclass(frozen=True, slots=True)
class Layout:
    """The modules without modules inside, by learner, in the order of the model's definition.

    products: linear, recurrent and convolution layers.
    """

    leaves: dict[str, tuple[str, ...]]
    norms: frozenset[Key]
    products: frozenset[Key]

    def named(self, key: Key) -> str:
        """Return the module's name, with the learner if there are several."""
        return ": ".join(key if len(self.leaves) > 1 else key[1:])


def layout(task) -> Layout:
    """Return the layout of all models of a task."""
    leaves = {
        (label, name): module
        for label, learner in task.learners.items()
        for name, module in learner.model.named_modules()
        if name and not any(module.children())
    }
    return Layout(
        {label: tuple(name for own, name in leaves if own == label) for label in task.learners},
        frozenset(key for key, module in leaves.items() if isinstance(module, NORM_LAYERS)),
        frozenset(key for key, module in leaves.items() if isinstance(module, _PRODUCTS)),
    )
