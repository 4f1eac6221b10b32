"""Cross-entropy of logits in a dtype of its own."""

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(
    logits: Tensor, labels: Tensor, dtype: torch.dtype, label_smoothing: float = 0.0
) -> Tensor:
    """Mean over [n, classes] logits, computed in `dtype`: the bits of casting the logits first.

    CUDA's softmax reads FP16 and computes in FP32, and its backward writes FP16: neither the
    logits nor their gradient exist in FP32, which for a large vocabulary is most of the memory.
    """
    if label_smoothing:
        return F.cross_entropy(logits.to(dtype), labels, label_smoothing=label_smoothing)
    return F.nll_loss(F.log_softmax(logits, 1, dtype=dtype), labels)
