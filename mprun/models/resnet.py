"""ResNet-50 v1.5 (He et al., arXiv 1512.03385, with the stride in the 3x3 convolution)."""

from torch import nn


def resnet50(num_classes: int = 1000) -> nn.Module:
    """torchvision's ResNet-50 v1.5 with random weights: 25,557,032 parameters at 1000 classes.

    Input ``[batch, 3, height, width]``, 32 px or more (published for 224); output logits
    ``[batch, num_classes]``.
    """
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes} is not allowed: 1 or more")
    # Here and not at the top: torchvision takes a second to import, which a language model or a
    # GAN should not pay for.
    from torchvision.models import resnet50 as torchvision_resnet50

    return torchvision_resnet50(weights=None, num_classes=num_classes)
