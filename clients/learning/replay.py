"""What a pass leaves behind, undone where a batch is evaluated again, and whom it draws from.

These are the states of generators, and buffers that it changes or replaces.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
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


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's generators of the CPU and of ``device``, by default of all devices.

    ``torch.manual_seed`` would format the call stack for each kind of device that is not in use.
    """
    if device is None:
        accelerator = getattr(torch, "accelerator", None)  # from PyTorch 2.6 on
        elsewhere = accelerator is None or accelerator.is_available()
    else:
        elsewhere = device.type != "cpu"
    if elsewhere:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


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
def kept_generators(tensors: Iterable[Tensor], *, everywhere: bool = False) -> Iterator[None]:
    """Undo changes made inside to torch's generators, of the CPU and of the tensors' devices.

    ``everywhere`` adds those of all GPUs in use, of NumPy and of Python's ``random``.
    """
    generators = Generators.of(tensors)
    if not everywhere:
        try:
            yield
        finally:
            generators.restore()
        return
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # which loops use
    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    of_cuda = torch.cuda.get_rng_state_all() if begun else []
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)
        generators.restore()


def seed_everywhere(seed: int) -> None:
    """Seed the generators of torch, on all devices, of NumPy and of Python's ``random``."""
    seed_generators(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - it is what others' transforms draw from


@contextmanager
def drawing_from(
    rng: np.random.Generator, tensor: Tensor, *, everywhere: bool = False
) -> Iterator[None]:
    """Seed torch's generators, of the CPU and of the tensor's device, by ``rng`` inside.

    Afterwards they are as they were; ``everywhere`` as of :func:`kept_generators`.
    """
    seed = int(rng.integers(2**63))
    with kept_generators([tensor], everywhere=everywhere):
        if everywhere:
            seed_everywhere(seed)
        else:
            seed_generators(seed, tensor.device)
        yield


@contextmanager
def without_trace(tensors: Iterable[Tensor], module: nn.Module | None) -> Iterator[None]:
    """Undo changes made inside to torch's generators and to the module's buffers.

    The generators are those of the CPU and of the devices of ``tensors``.
    """
    with kept_generators(tensors), kept_buffers(module):
        yield
