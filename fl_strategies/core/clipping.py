"""A bound on how far one upload can move the model.

    u <- u min(1, C/||u||)                                                      (1)

u   the change in a client's upload [d]: its model minus the model it received
C   bound, > 0

Reference: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language
Models", ICLR 2018, Algorithm 1 (FlatClip).
"""

from __future__ import annotations

import math

import numpy as np

from fl_strategies.core.vectors import Vector


def norm(u: Vector) -> float:
    """Return ||u|| of u [d], also where its square would overflow or vanish."""
    u = np.asarray(u, np.float64)
    with np.errstate(over="ignore"):
        size = float(np.linalg.norm(u))
    if 1e-150 < size < math.inf:
        return size
    largest = float(np.abs(u).max(initial=0.0))
    return largest * float(np.linalg.norm(u / largest)) if 0.0 < largest < math.inf else largest


def clip(u: Vector, bound: float) -> Vector:
    """Return (1) of finite u [d]: u itself where ||u|| <= ``bound``."""
    if norm(u) <= bound:
        return u
    direction = u / np.abs(u).max()
    return direction * (bound / float(np.linalg.norm(direction)))
