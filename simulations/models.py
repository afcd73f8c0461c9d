"""The papers' models, by name, the same for the same seed.

logistic   flatten, linear
binary     flatten, linear without bias, class 0's logit being 0: for two classes, with one number
           per feature, cross-entropy is the logistic loss log(1 + exp(-b z)), b = -1, 1 (FedPD)
mlp        flatten, 128 hidden units, ReLU (FedBC: 784-128-10)
mlp3       flatten, 128 and 64 hidden units, ReLU (FedBCD: 784-128-64-10)
cnn1       two 5x5 convolutions (32 and 64 filters, same padding), each with 2x2 max pooling and
           ReLU, then 512 hidden units, ReLU (FedADMM: 1,663,370 parameters on 1x28x28)
cnn2       the same with 256 hidden units (FedADMM: 1,105,098 parameters on 3x32x32)
cnn-10-20  two 5x5 convolutions (10 and 20 filters, no padding), each with 2x2 max pooling and ReLU,
           dropout of whole filters before the second pooling, then 50 hidden units, ReLU, dropout,
           both 0.5 (Delta-SGD: 21,840 parameters on 1x28x28). The paper says no more than a shallow
           CNN of two convolutions and two dense layers with dropout; the rest is its authors' code
cnn-bn     one 3x3 convolution with batch normalisation: small, for trying out buffers
resnet20   He et al.'s network for CIFAR-10 with batch normalisation: nine blocks of two 3x3
           convolutions with 16, 32 and 64 filters, shortcuts without parameters (FedBCD: 269,722
           parameters on 3x32x32)
resnet18, resnet50
           torchvision's, for 32x32: a first 3x3 convolution of stride 1 and no pooling after it
           (Delta-SGD: 11,173,962 and 23,520,842 parameters for CIFAR-10, 11,220,132 and
           23,705,252 for CIFAR-100)
cnn-6-16   two 5x5 convolutions without padding (6 and 16 filters), each with 2x2 max pooling and
           ReLU, then 120 and 84 hidden units, ReLU: FedBC's for CIFAR-10 (62,006 parameters); the
           dense layers, on which FedBC is silent, are those of Li et al., whom it cites for it
cnn-leaf   cnn1 with 2048 hidden units (LEAF's for FEMNIST: 6,603,710 parameters with 62 classes)

Of characters or tokens, integers [batch, length] less than a vocabulary:

lstm       embedding of 8 numbers, two layers of 256 LSTM units, linear from the last output (FedBC,
           LEAF for Shakespeare: 819,920 parameters for 80 characters; PyTorch has two biases a
           layer, of which one would do). On a GPU PyTorch warns that the weights, being pieces of
           one vector, are not where cuDNN wants them: it copies them at every call
distilbert a classifier of ``transformers``, from a folder or Hub name ``source``: its trained
           weights (layers that it lacks, or has for another number of classes, are new), or with
           ``pretrained=false`` its configuration alone and all weights new (Delta-SGD for AG News
           and DBpedia). Padding is not attended to. Any of ``transformers``' encoders of text will
           do, with its own tokenizer

Variants of the authors' codes. ``cnn1-linear``, ``cnn2-linear``: no ReLU after the convolutions.
``cnn1-authors``, ``cnn2-authors`` (FedADMM): no ReLU there and a softmax at the end.
``logistic-authors``: softmax at the end. ``mlp-authors`` (FedBC): dropout 0.5 before the
ReLU. As in the released code that softmax is fed to the ordinary cross-entropy, which applies a
softmax of its own; its input then lies in [0, 1], so the loss cannot fall below log(e + c - 1) - 1
for c classes and gradients are flat.

Features (``moon``) are the input of the last linear layer, after ReLU and dropout where there are
any; in the linear models (``logistic``, ``binary``) that is the flattened input, which no parameter
moves: MOON is FedAvg with them.

Inputs are [batch, *shape], outputs [batch, classes]: logits, or probabilities after a softmax.
The ReLU comes after the pooling: the same function for a quarter of the work.

References: Gong, Li, Freris, "FedADMM", ICDE 2022, Section V; Bedi et al., "FedBC", appendix E.1;
Wu et al., "FedBCD", AAAI 2021, Section 5; He et al., "Deep Residual Learning", CVPR 2016, 4.2;
Kim et al., "Adaptive Federated Learning with Auto-Tuned Clients" (Delta-SGD), ICLR 2024, Section 4;
Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022; Caldas et al., "LEAF", 2018; Sanh
et al., "DistilBERT", 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import getfullargspec
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from fl_strategies.core.schedules import check_flag, require
from fl_strategies.core.spelling import unknown, unknown_of
from simulations.hub import asked_briefly
from simulations.own import own
from simulations.text import DISTILBERT, transformers

Shape: TypeAlias = tuple[int, ...]

_SOFTMAX = partial(nn.Softmax, dim=1)


def build(
    name: str,
    shape: Shape,
    classes: int,
    *,
    seed: int,
    vocabulary: int | None = None,
    **options: Any,
) -> nn.Module:
    """Return model ``name`` for inputs [batch, *shape] and outputs [batch, classes].

    PyTorch's default initialisation, drawn from ``seed`` alone (what comes from a folder or the Hub
    stays as it is); no global random state is touched.

    Parameters
    ----------
    name : of this module's table, or "module:function" of your own: it gets shape and classes, and
        of text the vocabulary; its keyword-only arguments are the options
    vocabulary : where inputs are text, integers 0 ... vocabulary - 1
    options : of this module's models distilbert alone has some: ``source`` and ``pretrained``

    Raises
    ------
    ValueError
        An unknown name or option; a convolutional model on anything but images of 4x4 pixels or
        more (cnn-6-16, cnn-10-20: 16x16), [channels, height, width]; a model of text on anything
        else, or another on text; distilbert without ``transformers``, without its source, or with
        one that is too small for the vocabulary or the length.
    """
    known, mine = options_of(name), own(name)
    if mine is None and (vocabulary is not None) != (name in TEXT):
        takes = "integers below a vocabulary" if name in TEXT else "numbers"
        raise ValueError(f"model {name!r} takes {takes}; of text models are {', '.join(TEXT)}")
    if wrong := sorted(options.keys() - set(known)):
        raise ValueError(f"model {name!r} has no option {unknown_of(wrong, known)}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs as well
        of_text = () if vocabulary is None else (vocabulary,)
        if mine is not None:
            made: nn.Module = mine(shape, classes, *of_text, **options)
            require(isinstance(made, nn.Module), name, "a function that returns a Module", made)
            return made
        if of_text:
            return TEXT[name](shape, classes, *of_text, **options)
        # the layout in which a CPU is fastest with convolutions
        return MODELS[name](shape, classes, **options).to(memory_format=torch.channels_last)


def options_of(name: str) -> list[str]:
    """Return the names of the options of model ``name``."""
    mine = own(name)
    if mine is None and name not in (*MODELS, *TEXT):
        known = [*MODELS, *TEXT]
        hint = unknown([name], known)
        raise ValueError(f"unknown model {hint}; known: {', '.join(known)}")
    takes = mine or TEXT.get(name)
    return getfullargspec(takes).kwonlyargs if takes else []


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


def _cnn_10_20(shape: Shape, classes: int) -> nn.Module:
    channels, height, width = _image(shape, least=16)
    return nn.Sequential(
        nn.Conv2d(channels, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.Dropout2d(),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20 * (height // 4 - 3) * (width // 4 - 3), 50),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(50, classes),
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
    """Two 3x3 convolutions next to a shortcut that drops pixels and adds channels of zeros."""

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


def _resnet(shape: Shape, classes: int, *, layers: int) -> nn.Module:
    from torchvision import models  # here: it takes seconds, and most runs do without

    channels, _, _ = _image(shape)
    model: nn.Module = getattr(models, f"resnet{layers}")(num_classes=classes)
    model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as the rest
    model.maxpool = nn.Identity()
    return model


def _cnn_6_16(shape: Shape, classes: int) -> nn.Module:
    channels, height, width = _image(shape, least=16)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(6, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * (height // 4 - 3) * (width // 4 - 3), 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


class _Last(nn.Module):
    """The last of a recurrent layer's outputs [batch, length, units]."""

    def forward(self, outputs_and_state: tuple[Tensor, Any]) -> Tensor:
        return outputs_and_state[0][:, -1]


def _lstm(shape: Shape, classes: int, vocabulary: int) -> nn.Module:
    _text(shape)
    return nn.Sequential(
        nn.Embedding(vocabulary, 8),
        nn.LSTM(8, 256, num_layers=2, batch_first=True),
        _Last(),
        nn.Linear(256, classes),
    )


class _Classifier(nn.Module):
    """A classifier of ``transformers`` as a function of tokens [batch, length]."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        known = (x != self.body.config.pad_token_id).long()
        logits: Tensor = self.body(input_ids=x, attention_mask=known).logits
        return logits


def _distilbert(
    shape: Shape,
    classes: int,
    vocabulary: int,
    *,
    source: str = DISTILBERT,
    pretrained: bool = True,
) -> nn.Module:
    (length,) = _text(shape)
    require(isinstance(source, str), "source", "a text", source)
    check_flag("pretrained", pretrained)
    package = transformers()
    make = package.AutoModelForSequenceClassification
    try:
        with asked_briefly():
            config = package.AutoConfig.from_pretrained(source, num_labels=classes)
            for what, needed, there in (
                ("tokens a text", length, config.max_position_embeddings),
                ("different tokens", vocabulary, config.vocab_size),
            ):
                if needed > there:
                    raise ValueError(f"the data have {needed} {what}, the model knows {there}")
            if pretrained:
                body = make.from_pretrained(
                    source, config=config, dtype=torch.float32, ignore_mismatched_sizes=True
                )
                return _Classifier(body)
            return _Classifier(make.from_config(config))
    except (OSError, ValueError) as error:
        raise ValueError(f"model 'distilbert' from {source!r} (option source): {error}") from error


def _text(shape: Shape) -> Shape:
    if len(shape) != 1:
        raise ValueError(f"shape must be (length,) of a text, got {shape}")
    return shape


def _when(wanted: bool, layer: Callable[[], nn.Module]) -> list[nn.Module]:
    return [layer()] if wanted else []


def _image(shape: Shape, least: int = 4) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ValueError(
            f"shape must be (channels, height >= {least}, width >= {least}), got {shape}"
        )
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
    "cnn-10-20": _cnn_10_20,
    "cnn-bn": _cnn_bn,
    "resnet20": _resnet20,
    "resnet18": partial(_resnet, layers=18),
    "resnet50": partial(_resnet, layers=50),
    "cnn-6-16": _cnn_6_16,
    "cnn-leaf": partial(_cnn, hidden=2048),
}
TEXT: dict[str, Callable[..., nn.Module]] = {"lstm": _lstm, "distilbert": _distilbert}
"""Models of text."""
