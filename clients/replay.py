"""Evaluating a batch once more as if it had not happened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Generators(NamedTuple):
    """States of torch's generators, from which dropout draws its masks."""

    cpu: Tensor
    cuda: dict[int, Tensor]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Generators:
        """Return the present states: of the CPU's generator and of the tensors' GPUs."""
        devices = {tensor.get_device() for tensor in tensors if tensor.is_cuda}
        return cls(torch.get_rng_state(), {i: torch.cuda.get_rng_state(i) for i in devices})

    def restore(self) -> None:
        """Put the generators back into these states."""
        torch.set_rng_state(self.cpu)
        for device, state in self.cuda.items():
            torch.cuda.set_rng_state(state, device)


def seed_generators(seed: int, device: torch.device) -> None:
    """Do as ``torch.manual_seed`` for those who compute on ``device``, a CPU or not.

    On a CPU the others are left alone: each that is not yet in use would format the call stack.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@contextmanager
def kept_buffers(module: nn.Module | None) -> Iterator[None]:
    """Undo what is done inside to the module's buffers (running statistics, counters)."""
    buffers = [] if module is None else list(module.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


@contextmanager
def without_trace(tensors: Iterable[Tensor], module: nn.Module | None) -> Iterator[None]:
    """Undo what is done inside to torch's generators and to the module's buffers.

    ``tensors`` tell the devices whose generators are meant.
    """
    generators = Generators.of(tensors)
    try:
        with kept_buffers(module):
            yield
    finally:
        generators.restore()
