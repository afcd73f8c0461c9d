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


@contextmanager
def without_trace(tensors: Iterable[Tensor], module: nn.Module | None) -> Iterator[None]:
    """Undo what is done inside to torch's generators and to the module's buffers.

    ``tensors`` tell the devices whose generators are meant.
    """
    generators = Generators.of(tensors)
    buffers = [] if module is None else list(module.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        generators.restore()
