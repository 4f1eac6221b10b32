"""8x8 digits as data of one's own, shifted at random, and a small network for them."""

import torch
from torch import nn

from mprun.data import DatasetSource, load_digits


class Digits(torch.utils.data.Dataset):
    def __init__(self, part, shift):
        images, labels = load_digits()
        self.images, self.labels, self.shift = images[part] * 15, labels[part], shift

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        shift = int(torch.randint(-self.shift, self.shift + 1, ()))
        return self.images[index].roll(shift, dims=2), self.labels[index]


def data(batch_size, seed, device, workers=0, shift=1):
    splits = Digits(slice(1400), shift), Digits(slice(1400, None), 0)
    own = {"batch_size": batch_size, "seed": seed, "device": device, "workers": workers}
    return DatasetSource(*splits, num_classes=10, **own)


def network(data, width=32):
    first = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU())
    return nn.Sequential(first, second, nn.Flatten(), nn.Linear(32 * width, data.num_classes))
