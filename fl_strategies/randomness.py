"""Random streams that depend on a seed and on what they are for, and on nothing else.

A stream for (seed, purpose, round, client) is the same whichever process draws from it, and
whenever: results cannot depend on how clients were spread over workers, or on their order.
"""

from __future__ import annotations

import zlib

import numpy as np


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
    return np.random.default_rng(np.random.SeedSequence(words))
