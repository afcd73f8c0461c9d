"""Arrays as Flower's records hold them, copied once."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord

from fl_strategies.messages.internals import SType


def encoded(array: npt.ArrayLike) -> Array:
    """Return ``array`` as Flower's record of it."""
    return stacked([np.asarray(array)])


def recorded(arrays: Mapping[str, npt.ArrayLike]) -> ArrayRecord:
    """Return ``arrays`` as Flower's record of them; Flower's own constructor copies each again."""
    record = ArrayRecord()
    for name, array in arrays.items():
        record[name] = encoded(array)
    return record


def copied(record: ArrayRecord) -> ArrayRecord:
    """Return a record of the same bytes, which do not change, with arrays of its own."""
    new = record.copy()
    for name, array in record.items():
        new[name] = copy.copy(array)
    return new


def stacked(arrays: Sequence[npt.NDArray[Any]], count: int = 0) -> Array:
    """Return ``count`` arrays of one shape and type as the record of ``[count, ...]``.

    Each is copied once. With a ``count`` of 0 it is that of the only array, as it is.
    """
    values = [np.asarray(array, order="C") for array in arrays]
    shape = (count,) * bool(count) + values[0].shape
    dtype, header = _header(values[0].dtype.str, shape)
    return Array(dtype, shape, SType.NUMPY, b"".join((header, *(value.data for value in values))))


@functools.lru_cache(maxsize=256)
def _header(dtype: str, shape: tuple[int, ...]) -> tuple[str, bytes]:
    """Return the type's name, and what stands before the values in NumPy's format.

    Every round has the same few.
    """
    file = io.BytesIO()
    about = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)
    return str(np.dtype(dtype)), file.getvalue()
