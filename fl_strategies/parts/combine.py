"""Combine: how the uploads of a round become one vector, in the place of the weighted mean.

A rule that averages models does so by ``round.mean`` alone; a part of this stage is another
``round.mean``. Each upload counts alike: the rule's weights do not count, and neither does what a
client says of its number of samples. Hosts send every upload, not a mean: the server needs each.

Buffers (running statistics, counters) are combined number by number, integers rounded: by the part
itself if it does so with the model, else by the median. A part that chooses uploads by their
distances chooses by trained arrays, and an upload that is near in these may hold any buffers.

A rule that accumulates changes takes no such part: server and clients must add up the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fl_strategies.core.layout import Arrays
from fl_strategies.core.vectors import BLOCK, Vector
from fl_strategies.parts.part import MEAN_OF_MODELS, Need, Part

Stack = npt.NDArray[np.float64]
"""The uploads, [n, d]."""


AVERAGES = Need(
    MEAN_OF_MODELS.holds,
    "{rule} needs sums of what clients upload, in which every upload counts as it is; only a mean"
    " of models can be another one",
    MEAN_OF_MODELS.instead,
)


class Combine(Part):
    """Base of the parts that combine uploads."""

    stage = "combine"
    needs: ClassVar[tuple[Need, ...]] = (AVERAGES,)

    @property
    def least(self) -> int:
        """The fewest uploads of a round that is not skipped."""
        return 1

    def after(self, rejected: int) -> Combine:
        """Return the part for the other replies of a round in which so many were rejected."""
        return self

    def mean(self, weighted: Iterable[tuple[Vector, Any]]) -> Vector:
        """Return one vector [d] for those of the pairs, whose weights do not count."""
        return self.combined([vector for vector, _ in weighted])

    def combined(self, vectors: Sequence[Vector]) -> Vector:
        """Return one vector [d] for the uploads."""
        raise NotImplementedError

    def column(self, stack: Stack) -> Vector:
        """Return one number of a buffer for those of the uploads, [m] for a stack [n, m]."""
        return np.median(stack, axis=0)

    def buffers(self, buffers: Sequence[Arrays]) -> dict[str, Any]:
        """Return one set of buffers for those of the uploads."""
        return {
            name: typed(by_columns([np.ravel(one[name]) for one in buffers], self.column), array)
            for name, array in buffers[0].items()
        }


class ByCoordinate(Combine):
    """Base of the parts that combine each number of the model by itself, by :meth:`column`."""

    def combined(self, vectors: Sequence[Vector]) -> Vector:
        return by_columns(vectors, self.column)


class ByShares(Combine):
    """Base of the parts whose vector is a mean of the uploads, with shares of their own."""

    def shares(self, vectors: Sequence[Vector]) -> Sequence[float]:
        """Return the share of each upload."""
        raise NotImplementedError

    def combined(self, vectors: Sequence[Vector]) -> Vector:
        return shared(vectors, self.shares(vectors))


def by_columns(vectors: Sequence[Vector], column: Callable[[Stack], Vector]) -> Vector:
    """Return one vector [d] for the uploads, each number by itself."""
    arrays = [np.asarray(vector) for vector in vectors]
    combined = np.empty(len(arrays[0]))
    for s in range(0, len(combined), BLOCK):
        stack = np.stack([a[s : s + BLOCK] for a in arrays]).astype(np.float64)
        combined[s : s + BLOCK] = column(stack)
    return combined


def shared(vectors: Sequence[Vector], shares: Sequence[float]) -> Vector:
    """Return the mean of the vectors with these shares; one whole share is that vector."""
    used = [(v, share) for v, share in zip(vectors, shares, strict=True) if share]
    total = sum(share * np.asarray(vector, np.float64) for vector, share in used)
    return total / sum(share for _, share in used)


def typed(numbers: Vector, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the numbers in the shape and type of a buffer; integers are rounded."""
    whole = not np.issubdtype(like.dtype, np.floating)
    rounded = np.rint(numbers) if whole else np.asarray(numbers)
    return rounded.astype(like.dtype).reshape(like.shape)
