"""Losses that algorithms make of f, for a stack of clients.

A client rule that trains on another loss than f asks for ``oracle.on(make, ...)``. A stack needs
the same loss as a function of stacked vectors: its form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from clients.base import FederatedClient
from clients.learning.objective import Objective
from clients.learning.problem import Problem
from clients.moon import MOONClient, contrast
from clients.stacking import moon
from clients.stacking.stack import Stack


class Form(NamedTuple):
    """A loss that a client's rule makes of f, and the same loss for a stack."""

    make: Callable[..., Objective]
    """``make(problem, ...)`` returns a client's loss."""
    stacked: Callable[..., Stack]
    """``stacked(stack, ...)`` returns that of a stack of clients."""
    bytes_of: Callable[[Objective], int]
    """Bytes of a client in a stack, in addition to its vectors and a mini-batch."""
    alone_in_trial: Callable[[Problem], Objective]
    """Returns the loss on which a trial compares a stack with one client."""
    stacked_in_trial: Callable[[Stack], Stack]


PLAIN = Form(
    lambda problem: problem, lambda stack: stack, lambda problem: 0,
    lambda problem: problem, lambda stack: stack,
)  # fmt: skip
"""f itself."""

FORMS: dict[type[FederatedClient], Form] = {
    MOONClient: Form(
        contrast, moon.contrasts, moon.bytes_of, moon.alone_in_trial, moon.stacked_in_trial
    )
}
"""The loss of each client class that does not train on f."""


def form_of(client: type[FederatedClient]) -> Form:
    """Return the loss that clients of a class train on."""
    return FORMS.get(client, PLAIN)
