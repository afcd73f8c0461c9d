"""Evaluate a batch again without a trace: torch's generators and buffers stay as they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Generators(NamedTuple):
    """States of torch's generators, from which dropout draws its masks."""

    cpu: Tensor
    others: dict[torch.device, Tensor]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Generators:
        """Return the current states of the generators of the CPU and of the tensors' devices.

        A device other than a CPU (``cuda``, ``xpu``, ``mps`` ...) has its own generator.
        """
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        drawing = [(device, module) for device in devices if (module := _draws_from(device))]
        states = {device: module.get_rng_state(*_which(device)) for device, module in drawing}
        return cls(torch.get_rng_state(), states)

    def restore(self) -> None:
        """Put the generators back into these states."""
        torch.set_rng_state(self.cpu)
        for device, state in self.others.items():
            _draws_from(device).set_rng_state(state, *_which(device))


def _draws_from(device: torch.device) -> Any:
    """Return torch's module for the device, None where it has no generator (``meta``)."""
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "get_rng_state") else None


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """Return the device as an argument, for modules that serve several devices."""
    return () if device.type == "mps" else (device,)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of ``device``, as ``torch.manual_seed`` does for all.

    ``torch.manual_seed`` would format the call stack for each device that is not in use yet.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


class Before:
    """What a pass may change: the states of torch's generators, and a module's buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._generators = Generators.of(module.parameters())
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def restore(self) -> None:
        """Put them back as they were when this was made."""
        self._generators.restore()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)


@contextmanager
def kept_buffers(module: nn.Module | None) -> Iterator[None]:
    """Undo changes made inside to the module's buffers (running statistics, counters)."""
    buffers = [] if module is None else list(module.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


@contextmanager
def kept_generators(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Undo changes made inside to torch's generators, of the CPU and of the tensors' devices."""
    generators = Generators.of(tensors)
    try:
        yield
    finally:
        generators.restore()


@contextmanager
def without_trace(tensors: Iterable[Tensor], module: nn.Module | None) -> Iterator[None]:
    """Undo changes made inside to torch's generators and to the module's buffers.

    The generators are those of the CPU and of the devices of ``tensors``.
    """
    with kept_generators(tensors), kept_buffers(module):
        yield
