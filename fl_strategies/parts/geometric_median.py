"""The geometric median: the point whose distances to the uploads sum up to the least.

    v = argmin_v sum_i ||v - w_i||                                              (1)
    v <- sum_i s_i w_i / sum_i s_i,   s_i = 1 / max(nu, ||v - w_i||)            (2)

w_i  upload i, of n
nu   > 0: below this distance (1) is smoothed to ||.||^2 / (2 nu) + nu / 2

(2) is repeated, from the median of each number, until v moves by less than 1e-10 of the median of
its distances, or ``iterations`` times.

With f attackers, a = f/n < 1/2, v is within 2 (1 - a)/(1 - 2 a) r of any point from which all
honest uploads are within r, whatever the attackers upload.

Reference: Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", IEEE
Transactions on Signal Processing 2022, Algorithm 2; the bound: Minsker, Bernoulli 2015, Lemma 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_strategies.core.clipping import norm
from fl_strategies.core.hyperparameters import number
from fl_strategies.core.vectors import Vector
from fl_strategies.parts.combine import ByShares, shared
from fl_strategies.parts.median import Median

RESTS = 1e-10
"""The share of its distances by which v moves where the iteration ends."""


def shares_at(v: Vector, vectors: Sequence[Vector], *, nu: float) -> list[float]:
    """Return s_i, by (2)."""
    return [1.0 / max(nu, norm(v - w)) for w in vectors]


class GeometricMedian(ByShares):
    """(1) by (2); see the module's docstring."""

    name = "geometric-median"
    about = "the point with the least sum of distances to the uploads"
    paper = "Pillutla, Kakade, Harchaoui, IEEE TSP 2022"
    nu: float = number(default=1e-6, about="Smoothing of (1); the paper's.", above=0.0)
    iterations: int = number(default=100, about="The most steps (2).", integer=True, low=1)

    def shares(self, vectors: Sequence[Vector]) -> Sequence[float]:
        points = [np.asarray(vector, np.float64) for vector in vectors]
        v = Median().combined(points)
        shares = shares_at(v, points, nu=self.nu)
        for _ in range(self.iterations):
            before, v = v, shared(points, shares)
            shares = shares_at(v, points, nu=self.nu)
            if norm(v - before) * float(np.median(shares)) <= RESTS:
                break
        return shares
