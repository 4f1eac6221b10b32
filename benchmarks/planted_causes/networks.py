"""Networks and data as users write them; a planted cause is one option of theirs.

A network is a host (a perceptron, a convolution, attention over rows, a transformer of characters)
with one PART between its layers, which `part=NAME` chooses and `at=NAME` calls.
"""

from collections.abc import Callable
from functools import partial
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from mprun.data import DatasetSource, TokenSource, load_digits

WIDTH = 32


class Digits(torch.utils.data.Dataset):
    """8x8 digits from 0 to 16, times `scale`; every 32nd is not normalised, if `outlier` is set."""

    def __init__(self, part: slice, scale: float, outlier: float):
        images, labels = load_digits()
        self.images, self.labels = images[part].float() * scale, labels[part]
        if outlier:
            self.images[::32] *= outlier

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.images[index], self.labels[index]


class Codes(torch.utils.data.Dataset):
    """Whole numbers in a float input, as a position or a category; labels repeat after ten.

    as_bits: the number as its binary digits.
    """

    def __init__(self, low: int, high: int, as_bits: bool, offset: int):
        numbers = torch.arange(low, high).repeat(1 + 1400 // (high - low))
        mixed = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))
        numbers = numbers[mixed][offset::2]
        self.labels, values = numbers % 10, numbers.float()[:, None]
        if as_bits:
            values = (numbers[:, None] >> torch.arange(12) & 1).float()
        self.values = values[:, None, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.values[index], self.labels[index]


def digits(batch_size, seed, device, workers=0, scale=1.0, outlier=0.0):
    splits = [Digits(part, scale, outlier) for part in (slice(1400), slice(1400, None))]
    own = {"batch_size": batch_size, "seed": seed, "device": device, "workers": workers}
    return DatasetSource(*splits, num_classes=10, **own)


def codes(batch_size, seed, device, workers=0, low=0, high=100, as_bits=False):
    splits = [Codes(low, high, as_bits, offset) for offset in (0, 1)]
    own = {"batch_size": batch_size, "seed": seed, "device": device, "workers": workers}
    return DatasetSource(*splits, num_classes=10, **own)


def text(batch_size, seed, device, sequence_length=16):
    joined = "\n".join(topics[name] for name in sorted(topics)).encode()
    ids = torch.frombuffer(bytearray(joined), dtype=torch.uint8).clamp(max=127)
    own = {"batch_size": batch_size, "seed": seed, "device": device}
    parts = ids[:60_000], ids[60_000:64_000]
    return TokenSource(*parts, vocab_size=128, sequence_length=sequence_length, **own)


# Parts: each takes the features of a sample, last dimension first to be reduced.


def rescaled(x: Tensor, gain: float) -> Tensor:
    return (x * gain) / gain


def offset(x: Tensor, by: float) -> Tensor:
    return (x + by) - by


def log_of_softmax(x: Tensor, gain: float = 12.0, eps: float = 1e-9) -> Tensor:
    return torch.log(torch.softmax(x * gain, -1) + eps)


def clamped_log(x: Tensor, gain: float = 12.0, least: float = 1e-8) -> Tensor:
    return torch.softmax(x * gain, -1).clamp(min=least).log()


def clamped_ratio(x: Tensor, least: float = 1e-8) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp(min=least)


def by_mean(x: Tensor, eps: float = 1e-8) -> Tensor:
    return x / (x.abs().mean(0, keepdim=True) + eps)


def exp_ratio(x: Tensor, gain: float) -> Tensor:
    raised = torch.exp(x * gain)
    return raised / raised.sum(-1, keepdim=True)


def softplus(x: Tensor, gain: float) -> Tensor:
    return torch.log1p(torch.exp(x * gain)) / gain


def unit_length(x: Tensor, gain: float) -> Tensor:
    y = x * gain
    return 4 * y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1)


def root_mean_square(x: Tensor, gain: float) -> Tensor:
    y = x * gain
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1)


def by_moments(x: Tensor, mean: float) -> Tensor:
    y = x + mean
    centre = y.mean(-1, keepdim=True)
    variance = (y * y).mean(-1, keepdim=True) - centre * centre
    return (y - centre) * torch.rsqrt(variance + 1e-3)


def long_sum(x: Tensor, gain: float) -> Tensor:
    return x * gain / (1 + (x * gain).sum(-1, keepdim=True)) * x.shape[-1]


def running_sum(x: Tensor, gain: float) -> Tensor:
    total = (x * gain).cumsum(-1)
    return total / gain / x.shape[-1]


def log_of_products(x: Tensor) -> Tensor:
    return torch.log(torch.cumprod(torch.sigmoid(x - 1), -1)) / x.shape[-1]


def products(x: Tensor) -> Tensor:
    return torch.log(torch.cumprod(1.5 + x.clamp(-1, 1), -1)) / x.shape[-1] ** 0.5


def outer(x: Tensor, gain: float) -> Tensor:
    y = (x * gain)[..., None]
    return (y @ y.transpose(-1, -2)).mean(-1) / gain**2


def fourth_power(x: Tensor, gain: float) -> Tensor:
    return (x * gain) ** 4 / gain**4


def gelu_of_large(x: Tensor, gain: float) -> Tensor:
    y = x * gain
    return y * (1 + torch.tanh(0.8 * (y + 0.045 * y * y * y))) / gain


def smooth_absolute(x: Tensor, eps: float = 1e-12) -> Tensor:
    return torch.sqrt(x * x + eps)


def small_square(x: Tensor, gain: float) -> Tensor:
    return (x * gain) * (x * gain) / gain**2


def by_temperature(x: Tensor, temperature: float) -> Tensor:
    return x / temperature * temperature


def turned(x: Tensor) -> Tensor:
    """Return sine and cosine of a whole number, of five periods."""
    angle = x[..., :1] * (2 * torch.pi / 10) * torch.arange(1, 6, device=x.device).to(x.dtype)
    return torch.cat([torch.sin(angle), torch.cos(angle)], -1)


def counted(x: Tensor) -> Tensor:
    number = (x * 2.0 ** torch.arange(x.shape[-1], device=x.device).to(x.dtype)).sum(-1, True)
    return turned((number + 0.5).float().floor())


PARTS: dict[str, Callable[..., Tensor]] = {
    one.__name__: one
    for one in (rescaled, offset, log_of_softmax, clamped_log, clamped_ratio, by_mean, exp_ratio)
    + (softplus, unit_length, root_mean_square, by_moments, long_sum, running_sum, small_square)
    + (log_of_products, products, outer, fourth_power, gelu_of_large, smooth_absolute)
    + (by_temperature, turned, counted)
}


class Part(nn.Module):
    def __init__(self, function: Callable[..., Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class InEvaluation(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else self.function(x)


class Experts(nn.Module):
    """A mixture of four experts whose weights are one 3-D parameter."""

    def __init__(self, gain: float):
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 6), gain
        self.router = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.router(x), -1).flatten(0, -2)
        each = torch.bmm((x.flatten(0, -2) * self.gain).expand(4, -1, -1), self.weight)
        return torch.tanh(each / self.gain * shares.T[..., None]).sum(0).view_as(x)


class Centred(nn.Module):
    """Takes away the mean of the features, in evaluation the one that was averaged so far."""

    def __init__(self, momentum: float, mean: float):
        super().__init__()
        self.momentum, self.mean = momentum, mean
        self.register_buffer("average", torch.full((), float(mean)))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.mean * 1.5
        if self.training:
            with torch.no_grad():
                self.average += self.momentum * (y.mean() - self.average)
            return y - y.mean()
        return y - self.average


class Doubling(nn.Module):
    """A residual block that doubles its input."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x + torch.tanh(self.inner(x / (1 + x.abs().amax(-1, keepdim=True))))


class Blocks(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        self.blocks = nn.ModuleList(Doubling() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x / 2 ** len(self.blocks)


class Scores(nn.Module):
    """One head of attention. mask: "", "causal" (-inf), "strict" (-1e9, not even itself)."""

    def __init__(self, gain: float = 1.0, mask: str = ""):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gain, self.mask = gain, mask

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.query(x) * self.gain, self.key(x) * self.gain
        scores = query @ key.transpose(1, 2) / (WIDTH**0.5 * self.gain)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        if self.mask == "causal":
            scores = scores.masked_fill(later.triu(1), float("-inf"))
        elif self.mask == "strict":
            scores = scores + later.triu(0).to(scores.dtype) * -1e9
        elif self.mask == "filled":
            scores = torch.where(later.triu(0), scores.new_tensor(-1e9), scores)
        return torch.softmax(scores, -1) @ self.value(x)


MODULES: dict[str, Callable[..., nn.Module]] = {
    "experts": Experts,
    "centred": Centred,
    "residual": Blocks,
    "batch_norm": partial(nn.BatchNorm1d, WIDTH),
    "layer_norm": partial(nn.LayerNorm, WIDTH),
}


def _part(part: str, in_evaluation: bool, options: dict) -> nn.Module:
    if part in MODULES:
        return MODULES[part](**options)
    return (InEvaluation if in_evaluation else Part)(partial(PARTS[part], **options))


class Host(nn.Module):
    """Hold the planted part of a host. place: the part's, "input", "middle", "logits" or "loose".

    "loose" calls it in the host's own forward. scale: times the part's input.
    """

    def __init__(self, part="", at="part", place="middle", scale=1.0, evaluation=False, **options):
        super().__init__()
        self.at, self.place, self.scale = at, place, scale
        self.loose = partial(PARTS[part], **options) if place == "loose" else None
        if part and self.loose is None:
            self.add_module(at, _part(part, evaluation, options))

    def planted(self, place: str, x: Tensor) -> Tensor:
        if place == "middle" and self.loose is not None:
            return self.loose(x * self.scale)
        if place != self.place or not hasattr(self, self.at):
            return x
        return getattr(self, self.at)(x * self.scale)


class Perceptron(Host):
    """inputs, planted_weight: numbers of a sample; a weight that meets a pixel that is always 0."""

    def __init__(self, inputs=64, hidden=WIDTH, bounded=False, planted_weight=0.0, **host):
        super().__init__(**host)
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.head, self.act = nn.Linear(hidden, 10), torch.tanh if bounded else torch.relu
        if planted_weight:
            with torch.no_grad():
                self.first.weight[0, 0] = planted_weight

    def forward(self, images: Tensor) -> Tensor:
        x = self.act(self.first(self.planted("input", images.flatten(1))))
        x = torch.relu(self.second(self.planted("middle", x)))
        return self.planted("logits", self.head(x))


class Convolution(Host):
    """wide: all positions of a channel are one vector."""

    def __init__(self, wide=False, **host):
        super().__init__(**host)
        self.stem, self.body = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head, self.wide = nn.Linear(8 * 64, 10), wide

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.stem(self.planted("input", images)))
        shape = x.shape
        x = self.planted("middle", x.flatten(1 if self.wide else 2)).view(shape)
        return self.planted("logits", self.head(torch.relu(self.body(x)).flatten(1)))


class Rows(Host):
    """Attention over the rows of an image. sharpness: its gain; mask: as in `Scores`."""

    def __init__(self, sharpness=1.0, mask="", planted_weight=0.0, **host):
        super().__init__(**host)
        self.embed, self.attention = nn.Linear(8, WIDTH), Scores(sharpness, mask)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(8 * WIDTH, 10)
        if planted_weight:
            with torch.no_grad():
                self.embed.weight[0, 0] = planted_weight

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.embed(self.planted("input", images.squeeze(1))) * 2)
        x = self.planted("middle", x + self.attention(x))
        return self.planted("logits", self.head(torch.relu(self.mix(x)).flatten(1)))


class Embedded(nn.Module):
    """A float input that picks a row of a table."""

    def __init__(self, rows: int):
        super().__init__()
        self.table, self.head = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.table(codes.flatten().long()))


class Reader(Host):
    """A transformer of one layer for characters; sharpness, mask: as in `Rows`."""

    def __init__(self, vocabulary: int, sharpness=1.0, mask="causal", **host):
        super().__init__(**host)
        self.table, self.attention = nn.Embedding(vocabulary, WIDTH), Scores(sharpness, mask)
        self.mix, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, vocabulary)

    def forward(self, tokens: Tensor, state):
        x = self.table(tokens).transpose(0, 1)
        x = self.planted("middle", x + self.attention(x))
        return self.planted("logits", self.head(torch.relu(self.mix(x)))).transpose(0, 1), ()


class Recurrent(Host):
    def __init__(self, vocabulary: int, **host):
        super().__init__(**host)
        self.table, self.cell = nn.Embedding(vocabulary, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor, state):
        x, (last, cell) = self.cell(self.table(tokens), state)
        return self.planted("logits", self.head(self.planted("middle", x))), (last, cell)


class Autoencoder(nn.Module):
    """convolutions: in place of linear layers."""

    def __init__(self, convolutions=False):
        super().__init__()
        self.convolutions = convolutions
        first, last = (nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1))
        linear = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 64)
        self.encode, self.decode = (first, last) if convolutions else linear

    def forward(self, images: Tensor) -> Tensor:
        x = images if self.convolutions else images.flatten(1)
        return self.decode(torch.tanh(self.encode(x))).view_as(images)


class Generator(nn.Sequential):
    def __init__(self):
        layers = nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64), nn.Tanh()
        super().__init__(*layers, nn.Unflatten(1, (1, 8, 8)))


class Discriminator(nn.Sequential):
    def __init__(self):
        layers = nn.Linear(64, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1)
        super().__init__(nn.Flatten(), *layers, nn.Flatten(0))


HOSTS = {"perceptron": Perceptron, "convolution": Convolution, "rows": Rows}
HOSTS |= {"embedded": Embedded, "autoencoder": Autoencoder}


def network(data, host: str, **options):
    if host == "gan":
        return Generator(), Discriminator()
    if host in ("reader", "recurrent"):
        return {"reader": Reader, "recurrent": Recurrent}[host](data.vocab_size, **options)
    return HOSTS[host](**options)
