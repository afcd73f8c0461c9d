"""What a client's work takes of its device's memory, and whether that is free, before any of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from clients.learning.objective import Objective
from clients.learning.stack import activations

VECTORS = 12
"""Vectors [d] of one client, by a generous count: its state, the subproblem's, the solver's."""


class Room(NamedTuple):
    """Bytes, by a rough count."""

    data: int
    parameters: int
    """With their gradients."""
    state: int
    """Vectors of the rule and the solver."""
    batch: int
    """What the layers put out for a mini-batch, and the gradients of that."""
    cohort: int
    """What clients that are trained at once take in all, in the place of a state and a batch."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        one = max(self.state + self.batch, self.cohort)
        return self.data + self.parameters + one


def client_bytes(problem: Objective, samples: int) -> tuple[int, int]:
    """Return the bytes of a client's vectors, and of a mini-batch of so many samples."""
    size = problem.model.vector.element_size()
    vectors = VECTORS * len(problem.model.vector) * size
    return vectors, 2 * samples * activations(problem) * size


def check_room(room: Room, device: torch.device, free: int) -> None:
    """Raise ``ValueError``, with the numbers, where fewer than these bytes are ``free``."""
    if room.total <= free:
        return
    parts = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in room._asdict().items() if size)
    raise ValueError(
        f"clients need some {room.total / 1e6:,.1f} MB on {device}, where {free / 1e6:,.1f} are"
        f" free (MB: {parts}): take a smaller model, batch-size or cohort, or fewer workers a GPU"
    )
