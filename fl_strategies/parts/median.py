"""The median and the trimmed mean: each number of the model by itself.

    median    m_j = median of w_1j ... w_nj, the mean of the two middle ones if n is even       (1)
    trimmed   m_j = mean of w_1j ... w_nj without the floor(b n) smallest and as many largest   (2)

w_ij  number j of upload i, of n
b     ``share``, in [0, 1/2): the share of uploads that is cut off at each end; 0 is the mean

With f attackers, each number stays within the range of the honest ones, whatever the attackers
upload: by (1) if 2 f < n, by (2) if f <= floor(b n). On heterogeneous data neither is the mean:
both leave out what only few clients know.

Reference: Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates", ICML 2018, Algorithm 1.
"""

from __future__ import annotations

import numpy as np

from fl_strategies.core.hyperparameters import number
from fl_strategies.core.vectors import Vector
from fl_strategies.parts.combine import ByCoordinate, Stack


class Median(ByCoordinate):
    """(1); see the module's docstring."""

    name = "median"
    about = "the median of each number"
    paper = "Yin et al., ICML 2018"


class TrimmedMean(ByCoordinate):
    """(2); see the module's docstring."""

    name = "trimmed-mean"
    about = "the mean of each number without the extreme ones"
    paper = "Yin et al., ICML 2018"
    share: float = number(
        default=0.2, about="Share that is cut off at each end.", low=0.0, below=0.5
    )

    def column(self, stack: Stack) -> Vector:
        cut = int(self.share * len(stack) + 1e-9)  # 0.29 * 100 is below 29
        return np.sort(stack, axis=0)[cut : len(stack) - cut].mean(axis=0)
