"""The papers' models, by name, the same for the same seed.

logistic   flatten, linear
binary     flatten, linear without bias, class 0's logit being 0: for two classes, with one number
           per feature, cross-entropy is the logistic loss log(1 + exp(-b z)), b = -1, 1 (FedPD)
mlp        flatten, 128 hidden units, ReLU (FedBC: 784-128-10)
mlp3       flatten, 128 and 64 hidden units, ReLU (FedBCD: 784-128-64-10)
cnn1       two 5x5 convolutions (32 and 64 filters, same padding), each with 2x2 max pooling and
           ReLU, then 512 hidden units, ReLU (FedADMM: 1,663,370 parameters on 1x28x28)
cnn2       the same with 256 hidden units (FedADMM: 1,105,098 parameters on 3x32x32)
cnn-bn     one 3x3 convolution with batch normalisation: small, for trying out buffers
resnet20   He et al.'s network for CIFAR-10 with batch normalisation: nine blocks of two 3x3
           convolutions with 16, 32 and 64 filters, shortcuts without parameters (FedBCD: 269,722
           parameters on 3x32x32)

Variants of the authors' codes. ``cnn1-linear``, ``cnn2-linear``: no ReLU after the convolutions.
``cnn1-authors``, ``cnn2-authors`` (FedADMM): no ReLU there and a softmax at the end.
``logistic-authors``: softmax at the end. ``mlp-authors`` (FedBC): dropout 0.5 before the
ReLU. As in the released codes that softmax is fed to the ordinary cross-entropy, which applies a
softmax of its own; its input then lies in [0, 1], so the loss cannot fall below log(e + c - 1) - 1
for c classes and gradients are flat.

Inputs are [batch, *shape], outputs [batch, classes]: logits, or probabilities after a softmax.
The ReLU comes after the pooling: the same function for a quarter of the work.

References: Gong, Li, Freris, "FedADMM", ICDE 2022, Section V; Bedi et al., "FedBC", appendix E.1;
Wu et al., "FedBCD", AAAI 2021, Section 5; He et al., "Deep Residual Learning", CVPR 2016, 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

Shape: TypeAlias = tuple[int, ...]

_SOFTMAX = partial(nn.Softmax, dim=1)


def build(name: str, shape: Shape, classes: int, *, seed: int) -> nn.Module:
    """Return model ``name`` for inputs [batch, *shape] and outputs [batch, classes].

    PyTorch's default initialisation, drawn from ``seed`` alone; no global random state is touched.

    Raises
    ------
    ValueError
        An unknown name; a convolutional model on anything but images of 4x4 pixels or more,
        [channels, height, width].
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}, known are {', '.join(MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs as well
        return MODELS[name](shape, classes)


def _logistic(shape: Shape, classes: int, *, softmax: bool = False) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes), *_when(softmax, _SOFTMAX))


def _binary(shape: Shape, classes: int) -> nn.Module:
    scores = nn.Linear(prod(shape), classes - 1, bias=False)
    return nn.Sequential(nn.Flatten(), scores, nn.ConstantPad1d((1, 0), 0.0))


def _mlp(shape: Shape, classes: int, *, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(shape), 128),
        *_when(dropout > 0, partial(nn.Dropout, dropout)),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def _cnn(
    shape: Shape, classes: int, *, hidden: int, relu: bool = True, softmax: bool = False
) -> nn.Module:
    channels, height, width = _image(shape)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.MaxPool2d(2),
        *_when(relu, nn.ReLU),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.MaxPool2d(2),
        *_when(relu, nn.ReLU),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
        *_when(softmax, _SOFTMAX),
    )


def _cnn_bn(shape: Shape, classes: int) -> nn.Module:
    channels, height, width = _image(shape)
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * (height // 2) * (width // 2), classes),
    )


def _mlp3(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(shape), 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut that drops pixels and adds channels of zeros."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.more, self.stride = outputs - inputs, 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        inside: Tensor = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        before = self.more // 2
        short = x[:, :, :: self.stride, :: self.stride]
        return relu(inside + pad(short, (0, 0, 0, 0, before, self.more - before)))


def _resnet20(shape: Shape, classes: int) -> nn.Module:
    channels, _, _ = _image(shape)
    widths = [16] * 4 + [32] * 3 + [64] * 3
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(_Block(a, b) for a, b in pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def _when(wanted: bool, layer: Callable[[], nn.Module]) -> list[nn.Module]:
    return [layer()] if wanted else []


def _image(shape: Shape) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise ValueError(f"shape must be (channels, height >= 4, width >= 4), got {shape}")
    return shape[0], shape[1], shape[2]


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "logistic": _logistic,
    "logistic-authors": partial(_logistic, softmax=True),
    "binary": _binary,
    "mlp": _mlp,
    "mlp-authors": partial(_mlp, dropout=0.5),
    "mlp3": _mlp3,
    "cnn1": partial(_cnn, hidden=512),
    "cnn1-linear": partial(_cnn, hidden=512, relu=False),
    "cnn1-authors": partial(_cnn, hidden=512, relu=False, softmax=True),
    "cnn2": partial(_cnn, hidden=256),
    "cnn2-linear": partial(_cnn, hidden=256, relu=False),
    "cnn2-authors": partial(_cnn, hidden=256, relu=False, softmax=True),
    "cnn-bn": _cnn_bn,
    "resnet20": _resnet20,
}
