"""Local response normalisation across channels (Krizhevsky et al. 2012, section 3.3)."""

from torch import Tensor, nn
from torch.nn import functional as F


class LocalResponseNorm(nn.LocalResponseNorm):
    """``y_c = x_c / (k + alpha / size * sum of x_j^2 over the window around c) ** beta``.

    The window holds ``size`` neighbouring channels, and channels outside the tensor count as 0,
    as in ``torch.nn.LocalResponseNorm`` and Caffe. torch's module goes through ``avg_pool3d``,
    which has no half kernel on a CPU; this one does not.

    Input and output: ``[batch, channels, height, width]``, any floating dtype, computed in that
    dtype. A subclass of torch's, so that it counts as a norm layer.

    Raises ``ValueError`` unless ``size`` is odd and positive.
    """

    def __init__(
        self, size: int = 5, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
    ) -> None:
        super().__init__(size, alpha, beta, k)
        if size < 1 or size % 2 == 0:
            raise ValueError(f"size={size} is not allowed: an odd number, at least 1")
        if alpha < 0:
            raise ValueError(f"alpha={alpha} is not allowed: 0 or more")

    def forward(self, x: Tensor) -> Tensor:
        # Scaled before it is squared: x * x alone is inf in FP16 from |x| = 256 on, this way it is
        # finite up to 57,000. What underflows is far below k.
        squares = (x * (self.alpha / self.size) ** 0.5).square()
        reach = self.size // 2
        windows = F.pad(squares, (0, 0, 0, 0, reach, reach)).unfold(1, self.size, 1)
        return x * (self.k + windows.sum(-1)).pow(-self.beta)
