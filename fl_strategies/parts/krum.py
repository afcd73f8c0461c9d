"""Krum: the upload that is nearest to its neighbours; multi-Krum: the mean of the best ones.

    score_i = sum of ||w_i - w_j||^2 over the n - f - 2 uploads j nearest to i                  (1)
    Krum       w_i with the least score                                                         (2)
    multi-Krum mean of the k uploads with the least scores                                      (3)

w_i  upload i, of n; of equal scores the first client's is the least
f    ``attackers``, less the replies of the round that were rejected: each of these was one of them.
     n > 2 f + 2, and a round with fewer uploads is skipped
k    ``keep``; by default n - f. With k >= n (3) is the mean

Krum returns an upload of one client as it is. On heterogeneous data that is the model of a single
client; take multi-Krum there, or another part.

Flower's Krum and MultiKrum differ where these choices matter: distances include buffers, the chosen
uploads are averaged by samples, and n is not checked.

Reference: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine
Tolerant Gradient Descent", NeurIPS 2017, Section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_strategies.core.hyperparameters import number
from fl_strategies.core.vectors import Vector
from fl_strategies.parts.combine import ByShares


def scores(vectors: Sequence[Vector], attackers: int) -> list[float]:
    """Return the score of each vector, by (1)."""
    points = [np.asarray(vector, np.float64) for vector in vectors]
    n = len(points)
    apart = np.zeros((n, n))
    for i in range(n):
        for j in range(i):
            between = points[i] - points[j]
            apart[i, j] = apart[j, i] = between @ between
    others = [np.sort(np.delete(row, i)) for i, row in enumerate(apart)]
    return [float(row[: n - attackers - 2].sum()) for row in others]


class ByScores(ByShares):
    """Base of both."""

    paper = "Blanchard et al., NeurIPS 2017"
    attackers: int = number(default=1, about="f.", integer=True, low=0, high=10**6)

    @property
    def least(self) -> int:
        return 2 * self.attackers + 3

    def after(self, rejected: int) -> ByScores:
        left = max(self.attackers - rejected, 0)
        return type(self)(**{**self.values, "attackers": left}) if rejected else self


class MultiKrum(ByScores):
    """(3); see the module's docstring."""

    name = "multi-krum"
    about = "the mean of the uploads that are nearest to their neighbours"
    keep: int | None = number(
        default=None, about="k; by default n - f.", integer=True, low=1, high=10**6
    )

    def kept(self, uploads: int) -> int:
        """Return k."""
        return uploads - self.attackers if self.keep is None else self.keep

    def shares(self, vectors: Sequence[Vector]) -> Sequence[float]:
        best = np.argsort(scores(vectors, self.attackers), kind="stable")
        chosen = {*best[: self.kept(len(vectors))].tolist()}
        return [float(i in chosen) for i in range(len(vectors))]


class Krum(ByScores):
    """(2); see the module's docstring."""

    name = "krum"
    about = "the upload that is nearest to its neighbours"

    def shares(self, vectors: Sequence[Vector]) -> Sequence[float]:
        return MultiKrum(attackers=self.attackers, keep=1).shares(vectors)
