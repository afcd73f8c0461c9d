"""Numbers as bfloat16: the upper half of a float32, rounded to the nearest, ties to even."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST = 2.0**128 - 2.0**120
"""The largest bfloat16, 3.39e38."""


def halves(numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Return the finite bfloat16 nearest to each number, as its bits."""
    nearest = np.asarray(np.clip(numbers, -LARGEST, LARGEST), np.float32, order="C")
    bits = nearest.view(np.uint32)
    return np.asarray((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, np.uint16)


def numbers_of(halves: npt.NDArray[np.uint16], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the numbers of :func:`halves`, in another type."""
    numbers = np.asarray(halves.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # a received one may be no number
        return numbers.astype(dtype, copy=False)
