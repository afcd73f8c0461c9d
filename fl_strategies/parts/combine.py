"""Combine: how the uploads of a round become one vector, in the place of the weighted mean.

A rule that averages models does so by ``round.mean`` alone; a part of this stage is another
``round.mean``. Each upload counts alike: the rule's weights do not count, and neither does what a
client says of its number of samples. Buffers are combined in the same way, integers rounded.
Hosts do not fold, because the server needs each upload.

A rule that accumulates changes takes no such part: server and clients must add up the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    def mean(self, weighted: Iterable[tuple[Vector, Any]]) -> Vector:
        """Return one vector [d] for those of the pairs, whose weights do not count."""
        return self.combined([vector for vector, _ in weighted])

    def combined(self, vectors: Sequence[Vector]) -> Vector:
        """Return one vector [d] for the uploads."""
        raise NotImplementedError

    def buffers(self, vectors: Sequence[Vector], buffers: Sequence[Arrays]) -> dict[str, Any]:
        """Return one set of buffers for those of the uploads ``vectors``."""
        raise NotImplementedError


class ByCoordinate(Combine):
    """Base of the parts that combine each number of the model by itself."""

    def column(self, stack: Stack) -> Vector:
        """Return the numbers [d] for those of a stack [n, d]."""
        raise NotImplementedError

    def combined(self, vectors: Sequence[Vector]) -> Vector:
        arrays = [np.asarray(vector) for vector in vectors]
        starts = range(0, len(arrays[0]), BLOCK)
        blocks = [np.stack([a[s : s + BLOCK] for a in arrays]).astype(np.float64) for s in starts]
        return np.concatenate([self.column(block) for block in blocks])

    def buffers(self, vectors: Sequence[Vector], buffers: Sequence[Arrays]) -> dict[str, Any]:
        return {
            name: typed(self.combined([np.ravel(one[name]) for one in buffers]), array)
            for name, array in buffers[0].items()
        }


class ByShares(Combine):
    """Base of the parts whose vector is a mean of the uploads, with shares of their own."""

    def shares(self, vectors: Sequence[Vector]) -> Sequence[float]:
        """Return the share of each upload."""
        raise NotImplementedError

    def combined(self, vectors: Sequence[Vector]) -> Vector:
        return shared(vectors, self.shares(vectors))

    def buffers(self, vectors: Sequence[Vector], buffers: Sequence[Arrays]) -> dict[str, Any]:
        shares = self.shares(vectors) if buffers[0] else []
        return {
            name: typed(shared([np.ravel(one[name]) for one in buffers], shares), array)
            for name, array in buffers[0].items()
        }


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
