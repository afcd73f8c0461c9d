"""Forward passes of many small networks at once, without ``torch.vmap``.

``torch.vmap`` costs more than a small network does. For a chain of linear and elementwise layers,
the forward passes are batched matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.LeakyReLU)
"""Layers that act on every number separately."""

Forward = Callable[[Sequence[Tensor], Tensor], Any]
"""Outputs [clients, b, ...] for parameters [clients, ...] and inputs [clients, b, ...]."""


def chain(
    module: nn.Module,
    parameters: Sequence[nn.Parameter],
    heads: Sequence[nn.Module] = (),
    drop: Callable[[Tensor, float], Tensor] | None = None,
) -> Forward | None:
    """Return the forward pass of ``module`` for stacks of its ``parameters``, in their order.

    Returns None unless ``module`` is an ``nn.Sequential`` of ``nn.Flatten``, ``nn.Linear`` and
    elementwise layers, has no hooks, and has no other parameters. Samples are vectors, unless
    the module begins with ``nn.Flatten``.

    With ``heads``, the pass returns the outputs and the features [clients, b, p], which are the
    input of the last layer that is one of ``heads``. Returns None if no layer is.

    ``drop(x, p)`` does what ``nn.Dropout`` does in training mode; None allows no dropout.
    """
    if type(module) is not nn.Sequential or _hooked(module):
        return None
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    steps: list[Callable[[Sequence[Tensor], Tensor], Tensor]] = []
    for layer in module:
        if _hooked(layer) or not {id(p) for p in layer.parameters()} <= numbers.keys():
            return None
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            steps.append(lambda values, x: x.flatten(2))
        elif type(layer) is nn.Linear:
            bias = None if layer.bias is None else numbers[id(layer.bias)]
            steps.append(_linear(numbers[id(layer.weight)], bias))
        elif type(layer) is nn.Dropout and drop is not None:
            steps.append(_dropout(layer, drop))
        elif type(layer) in ELEMENTWISE:
            steps.append(_elementwise(layer))
        else:
            return None
    places = [place for place, layer in enumerate(module) if layer in heads]
    if heads and not places:
        return None

    def forward(values: Sequence[Tensor], inputs: Tensor) -> Tensor:
        for step in steps:
            inputs = step(values, inputs)
        return inputs

    def featured(values: Sequence[Tensor], inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = inputs
        for place, step in enumerate(steps):
            features = inputs if place == places[-1] else features
            inputs = step(values, inputs)
        return inputs, features.flatten(2)

    return featured if heads else forward


def _linear(weight: int, bias: int | None) -> Forward:
    def step(values: Sequence[Tensor], x: Tensor) -> Tensor:
        w = values[weight].transpose(1, 2)
        return torch.bmm(x, w) if bias is None else torch.baddbmm(values[bias][:, None], x, w)

    return step


def _dropout(layer: nn.Dropout, drop: Callable[[Tensor, float], Tensor]) -> Forward:
    def step(values: Sequence[Tensor], x: Tensor) -> Tensor:
        return drop(x, layer.p) if layer.training and layer.p else x

    return step


def _elementwise(layer: nn.Module) -> Forward:
    def step(values: Sequence[Tensor], x: Tensor) -> Tensor:
        outputs: Tensor = layer(x)
        return outputs

    return step


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
