"""Networks and batches as a script has them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

MODES = (
    *("fp32", "fp16_naive", "fp16_master", "fp16_master_scaled", "amp"),
    *("bf16_naive", "bf16_master", "amp_bf16"),
)
HALF_WEIGHTS = ("fp16_naive", "fp16_master", "fp16_master_scaled", "bf16_naive", "bf16_master")


class Net(nn.Module):
    """Convolution, both kinds of norm, a buffer, dropout, and parts that are called directly."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.checkpoints = checkpoints
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.body = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(12, 4)
        self.register_buffer("shift", torch.randn(6) / 3)

    def features(self, images):
        return self.norm(self.conv(images)).relu().mean((2, 3))

    def forward(self, images):
        x = self.features(images) + self.shift
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        return self.head(x)


class WithLoss(nn.Module):
    """Computes its loss itself, as language models do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)
        self.seen = []

    def forward(self, x, labels=None):
        logits = self.net(x)
        self.seen.append(logits.dtype)
        return logits, None if labels is None else F.cross_entropy(logits, labels)


def batches(count, size=8, seed=0):
    """(images, labels), the same for everybody."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        labels = torch.randint(4, (size,), generator=generator)
        yield torch.randn(size, 1, 5, 5, generator=generator) + 2 * labels.view(-1, 1, 1, 1), labels


def net(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)


def train(model, optimizer, steps=6, prepared=True, seed=0):
    """Losses of an ordinary loop; dropout begins at the same place for everybody."""
    torch.manual_seed(3)
    losses = []
    for images, labels in batches(steps, seed=seed):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        optimizer.backward(loss) if prepared else loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def overflowing(model):
    """A loss whose FP16 gradients overflow."""
    return model(torch.full((2, 1, 5, 5), 6e4)).square().sum() * 1e6
