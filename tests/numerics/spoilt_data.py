"""Images of one's own of which one is spoilt: with NaN, or so that a sound network fails on it."""

import os

import torch
from torch import nn

from mprun.data import DatasetSource

SPOILT = 7  # the image's number
RUN = ["model=custom", f"data.factory={__name__}:data", f"model.factory={__name__}:network"]
RUN += ["device=cpu", "threads=1", "data.batch_size=4", "train.steps=12", "precision=amp"]


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(index))
        if index == SPOILT:
            image[0, 0, :3] = float(os.environ["SPOILT_WITH"])
        return image, index % 3


def data(batch_size, seed, device, make=DatasetSource):
    own = {"batch_size": batch_size, "seed": seed, "device": device}
    held_out = torch.utils.data.Subset(Images(), range(8, 24))
    return make(Images(), held_out, num_classes=3, **own)


class OneWay(DatasetSource):
    """Refuses to go back to an earlier batch, as a stream does."""

    newest = -1

    def train_batch(self, index):
        if index < self.newest:
            raise ValueError("a stream has no way back")
        self.newest = index
        return super().train_batch(index)


def stream(batch_size, seed, device):
    return data(batch_size, seed, device, OneWay)


class Root(nn.Module):
    """Is NaN for an image with a number below zero, which is sound data."""

    def forward(self, images):
        return images.sqrt()


def network(data):
    return nn.Sequential(nn.Flatten(), Root(), nn.Linear(64, 3))
