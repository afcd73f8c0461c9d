"""Arrays as Flower's records hold them, copied once."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array

from fl_strategies.messages.internals import SType


def encoded(array: npt.ArrayLike) -> Array:
    """Return ``array`` as Flower's record of it."""
    return stacked([np.asarray(array)])


def stacked(arrays: Sequence[npt.NDArray[Any]], count: int = 0) -> Array:
    """Return ``count`` arrays of one shape and type as the record of ``[count, ...]``.

    Each is copied once. With a ``count`` of 0 it is that of the only array, as it is.
    """
    values = [np.asarray(array, order="C") for array in arrays]
    shape = (count,) * bool(count) + values[0].shape
    data = b"".join((_header(values[0].dtype.str, shape), *(value.data for value in values)))
    return Array(str(values[0].dtype), shape, SType.NUMPY, data)


@functools.lru_cache(maxsize=256)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return what stands before the values in NumPy's format; every round has the same few."""
    file = io.BytesIO()
    about = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()
