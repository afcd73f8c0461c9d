"""The device memory that a client's work needs, and a check that it is free before the work."""

from __future__ import annotations

from typing import NamedTuple

import torch

from clients.learning.objective import Objective
from clients.learning.stack import activations

VECTORS = 12
"""Vectors [d] of one client, a generous estimate: its state, its subproblem and its solver."""


class Room(NamedTuple):
    """Bytes, a rough estimate."""

    data: int
    parameters: int
    """With their gradients."""
    state: int
    """Vectors of the rule and the solver."""
    batch: int
    """What the layers put out for a mini-batch, and the gradients of that."""
    cohort: int
    """What stacked clients need in total, instead of a state and a batch."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        one = max(self.state + self.batch, self.cohort)
        return self.data + self.parameters + one


def client_bytes(problem: Objective, samples: int) -> tuple[int, int]:
    """Return the bytes of a client's vectors, and of a mini-batch of ``samples`` samples."""
    size = problem.model.vector.element_size()
    vectors = VECTORS * len(problem.model.vector) * size
    return vectors, 2 * samples * activations(problem) * size


def check_room(room: Room, device: torch.device, free: int) -> None:
    """Raise ``ValueError``, with the numbers, if fewer bytes than these are ``free``."""
    if room.total <= free:
        return
    parts = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in room._asdict().items() if size)
    raise ValueError(
        f"clients need some {room.total / 1e6:,.1f} MB on {device}, where {free / 1e6:,.1f} are"
        f" free (MB: {parts}): take a smaller model, batch-size or cohort, or fewer workers a GPU"
    )
