"""Small networks as tutorials write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 3


class Idiom(NamedTuple):
    """What makes a network, and the shape of a sample (of tokens if ``vocabulary``)."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    vocabulary: int = 0

    def samples(self, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return ``n`` inputs and their targets."""
        generator = torch.Generator().manual_seed(seed)
        if self.vocabulary:
            x = torch.randint(self.vocabulary, (n, *self.shape), generator=generator)
        else:
            x = torch.randn(n, *self.shape, generator=generator, dtype=torch.float64)
        return x, torch.arange(n) % CLASSES


class Quickstart(nn.Module):
    """Flower's quickstart for PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class Convolved(nn.Module):
    """Layers, then ``flat``, then a linear layer."""

    def __init__(
        self, layers: nn.Module, features: int, flat: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.layers, self.flat = layers, flat or viewed
        self.head = nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.flat(self.layers(x)))


def viewed(x: Tensor) -> Tensor:
    return x.view(x.size(0), -1)


def reshaped(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1)


def flattened(x: Tensor) -> Tensor:
    return torch.flatten(x, 1)


def permuted(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous().view(x.size(0), -1)


class Perceptron(nn.Module):
    """No convolution, on images."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(2 * 6 * 6, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x.view(-1, 2 * 6 * 6))))


class Block(nn.Module):
    """Squeeze and excitation, which views inside a submodule; a residual sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.gate = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        b, c = x.shape[:2]
        y = self.conv(x)
        scale = torch.sigmoid(self.gate(y.view(b, c, -1).mean(2))).view(b, c, 1, 1)
        return x + torch.tanh(y * scale)


class Shuffle(nn.Module):
    """ShuffleNet's exchange of channels between groups."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.size()
        x = x.view(b, self.groups, c // self.groups, h, w)
        return torch.transpose(x, 1, 2).contiguous().view(b, -1, h, w)


class Standardised(nn.Conv2d):
    """A convolution with standardised weights, which it views."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.view(self.weight.size(0), -1)
        rows = (rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-5)
        return F.conv2d(x, rows.view_as(self.weight), self.bias)


class Functional(nn.Module):
    """Weights and operations in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 2, 3, 3) / 4)
        self.w2 = nn.Parameter(torch.randn(CLASSES, 4 * 4 * 4) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.conv2d(x, self.w1))
        return F.linear(x.view(len(x), -1), self.w2)


class AutoEncoder(nn.Module):
    """Convolutions down, transposed ones up, views between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, stride=2)
        self.code, self.back = nn.Linear(4 * 2 * 2, 5), nn.Linear(5, 4 * 2 * 2)
        self.up = nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1)
        self.head = nn.Linear(2 * 6 * 6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = self.code(torch.tanh(self.down(x)).view(-1, 4 * 2 * 2))
        x = self.up(torch.tanh(self.back(z)).view(-1, 4, 2, 2))
        return self.head(x.view(x.size(0), -1))


class Recurrent(nn.Module):
    """Tokens, LSTM, the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(self.embedding(x))
        return self.head(out[:, -1].contiguous().view(-1, 5))


class Attentive(nn.Module):
    """Attention over tokens, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        b, t, d = x.size()
        q, k, v = (z.view(b, t, 2, 3).transpose(1, 2) for z in self.qkv(x).split(d, dim=2))
        y = torch.softmax(q @ k.transpose(-2, -1) / 3**0.5, -1) @ v
        x = self.norm(x + self.out(y.transpose(1, 2).contiguous().view(b, t, d)))
        return self.head(x.mean(1))


class VisionTransformer(nn.Module):
    """Patches by a convolution, a class token, PyTorch's encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, 8, 3, stride=3)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.place = nn.Parameter(torch.randn(1, 5, 8) / 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        x = x.view(x.size(0), 8, -1).permute(0, 2, 1)
        x = torch.cat([self.token.expand(x.size(0), -1, -1), x], 1) + self.place
        return self.head(self.layer(x)[:, 0])


class Tied(nn.Module):
    """Two names of one convolution's filters, and an embedding that is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 3, padding=1)
        self.second = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(2 * 6 * 6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(viewed(self.second(torch.tanh(self.first(x)))))


class Frozen(Quickstart):
    """Flower's quickstart with frozen first layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1.requires_grad_(False)


def small(flat: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Convolved(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh()), 64, flat)


def convolved(features: int, make: Callable[[], list[nn.Module]]) -> Callable[[], nn.Module]:
    return lambda: Convolved(nn.Sequential(*make()), features)


IMAGE = (2, 6, 6)


class Averaged(nn.Module):
    """Keeps a moving average and a count, and puts a new tensor in their places in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, CLASSES)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = 0.5 * self.average + x.mean(0).detach()
            self.count = self.count + 1
        return self.head(x + self.average)


class MaxNorm(nn.Linear):
    """Bounds the norms of its rows, as EEGNet does."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(x)


IDIOMS: dict[str, Idiom] = {
    "averaged": Idiom(Averaged, (6,)),
    "max-norm": Idiom(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), MaxNorm(5, CLASSES)), (6,)),
    "quickstart": Idiom(Quickstart, (3, 32, 32)),
    "view": Idiom(small(viewed), IMAGE),
    "reshape": Idiom(small(reshaped), IMAGE),
    "flatten": Idiom(small(flattened), IMAGE),
    "permute": Idiom(small(permuted), IMAGE),
    "perceptron": Idiom(Perceptron, IMAGE),
    "submodules": Idiom(convolved(72, lambda: [Block(2), Block(2)]), IMAGE),
    "depthwise": Idiom(
        convolved(64, lambda: [nn.Conv2d(2, 2, 3, groups=2), nn.ReLU(), nn.Conv2d(2, 4, 1)]), IMAGE
    ),
    "grouped": Idiom(
        convolved(64, lambda: [nn.Conv2d(2, 4, 3, groups=2), Shuffle(2), nn.ReLU()]), IMAGE
    ),
    "transposed": Idiom(AutoEncoder, IMAGE),
    "1-d": Idiom(convolved(24, lambda: [nn.Conv1d(2, 4, 3), nn.Tanh()]), (2, 8)),
    "3-d": Idiom(convolved(32, lambda: [nn.Conv3d(2, 4, 3), nn.Tanh()]), (2, 4, 4, 4)),
    "lstm": Idiom(Recurrent, (5,), 7),
    "attention": Idiom(Attentive, (5,), 7),
    "vision-transformer": Idiom(VisionTransformer, IMAGE),
    "batch-norm": Idiom(
        # batch norm takes a bias out again: its gradient is a rounding, or 0
        convolved(64, lambda: [nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()]),
        IMAGE,
    ),
    "group-norm": Idiom(
        convolved(64, lambda: [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()]), IMAGE
    ),
    "dropout": Idiom(
        convolved(64, lambda: [nn.Conv2d(2, 4, 3), nn.Dropout(0.4), nn.ReLU()]), IMAGE
    ),
    "tied": Idiom(Tied, IMAGE),
    "frozen": Idiom(Frozen, (3, 32, 32)),
    "standardised": Idiom(convolved(64, lambda: [Standardised(2, 4, 3), nn.Tanh()]), IMAGE),
    "functional": Idiom(Functional, IMAGE),
}
