"""The one small problem behind every algorithm here.

A client approximately solves

    min_w  f(w) + <a, w> + (r/2) ||w - c||^2,                                   (0)

with gradient  g(w) + a + r (w - c). On the client, an algorithm *is* its choice of the slope ``a``,
the pull ``r`` and the centre ``c``. The solver decides how the problem is solved.

Vectors are NumPy arrays or torch tensors, ``[d]`` for one client or ``[clients, d]`` for a stack of
clients: rules are written elementwise and never write into their arguments
(``fl_strategies.core.stacks``).
"""

from __future__ import annotations

from typing import NamedTuple

from fl_strategies.core.vectors import Number, Vector


class Subproblem(NamedTuple):
    """Slope ``a``, pull ``r >= 0`` and centre ``c`` of (0); the defaults leave f alone.

    In a stack the pull is one number for all clients, or a column ``[clients, 1]``.
    """

    slope: Vector | float = 0.0
    pull: Number = 0.0
    centre: Vector | float = 0.0

    @property
    def bends(self) -> bool:
        """Whether (0) is not f alone; a vector or a column counts, whatever its numbers."""
        return any(not isinstance(part, int | float) or part != 0.0 for part in self[:2])

    def gradient(self, w: Vector, g: Vector) -> Vector:
        """Return the gradient of (0) at ``w``, where f has the gradient ``g``."""
        return g + self.slope + self.pull * (w - self.centre)
