"""The one small problem behind every algorithm here.

A client approximately solves

    min_w  f(w) + <a, w> + (r/2) ||w - c||^2,                                   (0)

with gradient  g(w) + a + r (w - c). What an algorithm *is* on the client are its choices of the
slope ``a``, the pull ``r`` and the centre ``c``; how the problem is solved is the solver's affair.

Vectors are NumPy arrays or torch tensors, ``[d]`` for one client or ``[clients, d]`` for a stack of
them: rules are written elementwise and never write into what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

Vector: TypeAlias = Any
"""``numpy.ndarray`` or ``torch.Tensor``, ``[d]`` or ``[clients, d]``."""


class Subproblem(NamedTuple):
    """Slope ``a``, pull ``r >= 0`` and centre ``c`` of (0); the defaults leave f alone."""

    slope: Vector | float = 0.0
    pull: float = 0.0
    centre: Vector | float = 0.0

    def gradient(self, w: Vector, g: Vector) -> Vector:
        """Return the gradient of (0) at ``w``, where f has the gradient ``g``."""
        return g + self.slope + self.pull * (w - self.centre)


class Iterates(NamedTuple):
    """The present iterate of a solver and the one before it: what its momentum needs to go on."""

    x: Vector
    previous: Vector


Solve: TypeAlias = Callable[[Vector, Subproblem], Vector]
"""``solve(start, subproblem)`` returns an approximate minimiser of (0), as a new vector.

Started from :class:`Iterates`, it goes on with their momentum and returns its last two iterates.
"""


def weighted_mean(weighted: Iterable[tuple[Vector, float]]) -> Vector:
    """Return sum_i weight_i v_i / sum_i weight_i over ``(v_i, weight_i)``, holding one v at a time.

    Raises ``ValueError`` when there is nothing to average or the weights sum to zero.
    """
    total: Vector = 0.0
    weights = 0.0
    for vector, weight in weighted:
        total = total + weight * vector
        weights += weight
    if weights == 0.0:
        raise ValueError("a mean needs at least one vector with a positive weight")
    return total / weights
