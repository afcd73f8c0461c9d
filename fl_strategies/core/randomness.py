"""Random streams that depend on a seed and on their purpose, and on nothing else.

A stream for (seed, purpose, round, client) is the same in every process and at every time. So
results do not depend on how clients are spread over workers or on the order of their work.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def stream(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """Return the generator of ``purpose`` (say ``"sample"``) at ``indices`` (say round, client).

    Examples
    --------
    >>> stream(1, "sample", 3).integers(100) == stream(1, "sample", 3).integers(100)
    np.True_
    """
    words = (seed, zlib.crc32(purpose.encode()), *indices)
    if min(words) < 0:
        raise ValueError(f"seed and indices must be >= 0, got {(seed, *indices)}")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


def share(fraction: float, of: int) -> int:
    """Return how many of ``of`` items ``fraction`` of them are, rounded down.

    Examples
    --------
    >>> share(0.29, 100), int(0.29 * 100)
    (29, 28)
    """
    return int(fraction * of + 1e-9)


def draw(rng: np.random.Generator, items: Sequence[T], size: int | None = None) -> list[T]:
    """Return ``size`` of ``items`` (by default all), without repetition, in random order.

    Positions are drawn, not items: NumPy converts ids on both sides of 2^63 to floats.

    Examples
    --------
    >>> sorted(draw(stream(1, "sample", 3), [2**63 - 1, 2**63, 7])) == [7, 2**63 - 1, 2**63]
    True
    """
    if size is None:
        return [items[place] for place in rng.permutation(len(items))]
    return [items[place] for place in rng.choice(len(items), size, replace=False)]
