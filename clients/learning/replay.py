"""What a pass leaves behind: undone where a batch is evaluated again, else taken into the model.

These are the states of torch's generators, and buffers and parameters that it changes or replaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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


class Buffers:
    """A module's buffers, which a pass may change, or replace by other tensors."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [
            (part._buffers, name, buffer, buffer.clone())
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back as they were when this was made."""
        for buffers, name, buffer, value in self._held:
            buffer.copy_(value)
            buffers[name] = buffer


class Places:
    """Where a module has its values: a forward pass may put others there.

    So do ``self.weight.data = ...`` and ``self.mean = 0.9 * self.mean + ...``.
    """

    def __init__(
        self, module: nn.Module, views: Mapping[nn.Parameter, Tensor], tensors: Mapping[str, Tensor]
    ) -> None:
        self._views = views
        self._buffers = [
            (part._buffers, name, own)
            for at, part in module.named_modules()
            for name, _ in part._buffers.items()
            if (own := tensors.get(f"{at}.{name}" if at else name)) is not None
        ]

    @torch.no_grad()
    def take_in(self) -> None:
        """Take in values that lie elsewhere; raise ``ValueError`` for a buffer of another shape."""
        for parameter, view in self._views.items():
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter)
                parameter.data = view
        for buffers, name, own in self._buffers:
            new = buffers[name]
            if new is not None and new.data_ptr() != own.data_ptr():
                if new.shape != own.shape:
                    was, got = tuple(own.shape), tuple(new.shape)
                    raise ValueError(f"a forward pass made the buffer {name!r} {got}, it was {was}")
                own.copy_(new)
                buffers[name] = own


class Before:
    """What a pass may change: the states of torch's generators, and a module's buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._generators = Generators.of(module.parameters())
        self._buffers = Buffers(module)

    def restore(self) -> None:
        """Put them back as they were when this was made."""
        self._generators.restore()
        self._buffers.restore()


@contextmanager
def kept_buffers(module: nn.Module | None) -> Iterator[None]:
    """Undo changes made inside to the module's buffers (running statistics, counters)."""
    before = None if module is None else Buffers(module)
    try:
        yield
    finally:
        if before is not None:
            before.restore()


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
