"""Forward passes of many small networks at once, without ``torch.vmap``.

``torch.vmap`` costs more than a small network does. For a chain of linear and elementwise layers,
the forward passes are batched matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.LeakyReLU)
"""Layers that act on every number separately."""

Forward = Callable[[Sequence[Tensor], Tensor], Tensor]
"""Outputs [clients, b, ...] for parameters [clients, ...] and inputs [clients, b, ...]."""


def chain(module: nn.Module, parameters: Sequence[nn.Parameter]) -> Forward | None:
    """Return the forward pass of ``module`` for stacks of its ``parameters``, in their order.

    Returns None unless ``module`` is an ``nn.Sequential`` of ``nn.Flatten``, ``nn.Linear`` and
    elementwise layers, has no hooks, and has no other parameters. Samples are vectors, unless
    the module begins with ``nn.Flatten``.
    """
    if type(module) is not nn.Sequential or _hooked(module):
        return None
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    steps: list[Callable[[Sequence[Tensor], Tensor], Tensor]] = []
    for layer in module:
        if _hooked(layer) or not {id(p) for p in layer.parameters()} <= places.keys():
            return None
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            steps.append(lambda given, x: x.flatten(2))
        elif type(layer) is nn.Linear:
            bias = None if layer.bias is None else places[id(layer.bias)]
            steps.append(_linear(places[id(layer.weight)], bias))
        elif type(layer) in ELEMENTWISE:
            steps.append(_elementwise(layer))
        else:
            return None

    def forward(given: Sequence[Tensor], inputs: Tensor) -> Tensor:
        for step in steps:
            inputs = step(given, inputs)
        return inputs

    return forward


def _linear(weight: int, bias: int | None) -> Forward:
    def step(given: Sequence[Tensor], x: Tensor) -> Tensor:
        w = given[weight].transpose(1, 2)
        return torch.bmm(x, w) if bias is None else torch.baddbmm(given[bias][:, None], x, w)

    return step


def _elementwise(layer: nn.Module) -> Forward:
    def step(given: Sequence[Tensor], x: Tensor) -> Tensor:
        found: Tensor = layer(x)
        return found

    return step


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
