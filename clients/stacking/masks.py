"""Dropout for stacked clients: each gets the masks that it draws when it is trained alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn


class FurtherMasks(RuntimeError):
    """Raised where a rule needs other masks than those of its local steps' mini-batches."""


class Masks:
    """Draws the masks of a stack's clients, each from a generator that has the client's seed.

    :meth:`of` says whose mini-batches are computed; without it, :meth:`dropped` raises
    :class:`FurtherMasks`. On a CPU the masks are those of ``torch.dropout`` on contiguous
    activations.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._drawing: list[tuple[torch.Generator, int]] = []

    @contextmanager
    def of(self, clients: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Iterator[None]:
        """Inside, the numbers of the stacked clients and the sizes of their mini-batches."""
        pairs = zip(clients.tolist(), sizes.tolist(), strict=True)
        self._drawing = [(self._generators[client], size) for client, size in pairs]
        try:
            yield
        finally:
            self._drawing = []

    def dropped(self, x: Tensor, p: float) -> Tensor:
        """Return the activations x [k, b, ...], each 0 with probability p; padding is 0."""
        if len(self._drawing) != len(x):
            raise FurtherMasks("dropout draws further masks than those of local steps")
        noise = torch.zeros(x.shape, dtype=x.dtype)
        for row, (generator, size) in zip(noise.unbind(), self._drawing, strict=True):
            row[:size].bernoulli_(1.0 - p, generator=generator)
        return x * noise.div_(1.0 - p)


class _Dropped(torch.autograd.Function):
    """``Masks.dropped`` under ``torch.vmap``, which hands over the activations of all clients."""

    @staticmethod
    def forward(x: Tensor, masks: Masks, p: float) -> Tensor:
        raise RuntimeError("masks are drawn under torch.vmap alone")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: autograd sees the operators of ``vmap``."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, masks: Masks, p: float) -> tuple[Tensor, int]:
        """Return the activations after dropout, and the clients' dimension."""
        return masks.dropped(x.movedim(in_dims[0], 0), p), 0


def _dropped(masks: Masks, p: float, x: Tensor) -> Tensor:
    dropped: Tensor = _Dropped.apply(x, masks, p)
    return dropped


def dropouts(module: nn.Module) -> list[nn.Dropout]:
    """Return the module's layers that drop activations."""
    return [part for part in module.modules() if isinstance(part, nn.Dropout) and part.p > 0.0]


@contextmanager
def masked(module: nn.Module, masks: Masks) -> Iterator[None]:
    """Inside, under ``torch.vmap``, the module's dropout in training mode is that of ``masks``."""
    layers = [layer for layer in dropouts(module) if layer.training]
    for layer in layers:
        layer.forward = functools.partial(_dropped, masks, layer.p)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
