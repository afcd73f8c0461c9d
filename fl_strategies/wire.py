"""What comes over the wire, decoded without trust."""

from __future__ import annotations

import functools
import io
import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from flwr.app import Array

    from fl_strategies.layout import Layout

MAX_HEADER = 4096
"""Bytes that a NumPy array header may take (a usual one takes 128)."""


class BadReply(ValueError):
    """A reply that cannot be used; its text is the reason."""


def decode(array: Array) -> npt.NDArray[Any]:
    """Return the array in ``array.data`` as a read-only view of those bytes.

    Nothing is allocated by what the bytes claim. Raises :class:`BadReply` unless the bytes are
    one plain NumPy array (no pickle) of exactly the size that their header states.
    """
    try:
        width = {b"\x01\x00": 2, b"\x02\x00": 4}[array.data[6:8]]  # by the format's version
        start = 8 + width + int.from_bytes(array.data[8 : 8 + width], "little")
        shape, fortran_order, dtype = _header(array.data[:start])
        size = math.prod(shape)
        fits = size * dtype.itemsize == len(array.data) - start
        if dtype.hasobject or min(shape, default=0) < 0 or not fits:
            raise ValueError(f"{len(array.data)} bytes do not hold an array {dtype} {shape}")
        flat: npt.NDArray[Any] = np.frombuffer(array.data, dtype, size, offset=start)
        return flat.reshape(shape, order="F" if fortran_order else "C")
    except Exception as error:
        raise BadReply(f"not a NumPy array ({error})") from None


@functools.lru_cache(maxsize=256)
def _header(start: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, Fortran order and type from the bytes before the values.

    Kept, for every round brings the same few, and NumPy compiles each as Python.
    """
    file = io.BytesIO(start)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[np.lib.format.read_magic(file)]
    return read(file, max_header_size=MAX_HEADER)


def decode_model(record: Mapping[str, Array], layout: Layout) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of ``record``; raise :class:`BadReply` unless they fit ``layout``."""
    if record.keys() != layout.shapes.keys():
        missing = sorted(layout.shapes.keys() - record.keys())
        extra = sorted(record.keys() - layout.shapes.keys())
        raise BadReply(f"array names differ: missing {missing}, unexpected {extra}")
    arrays = {}
    for name, shape in layout.shapes.items():
        try:
            array = decode(record[name])
        except BadReply as error:
            raise BadReply(f"array {name!r}: {error}") from None
        if array.shape != shape:
            raise BadReply(f"array {name!r} has shape {array.shape}, the model's has {shape}")
        if array.dtype != layout.dtypes[name]:
            raise BadReply(
                f"array {name!r} has type {array.dtype.str}, the model's has"
                f" {layout.dtypes[name].str}"
            )
        if not np.isfinite(array).all():
            where = int(np.flatnonzero(~np.isfinite(array.ravel()))[0])
            value = array.ravel()[where]
            raise BadReply(f"array {name!r} is not finite: element {where} is {value}")
        arrays[name] = array
    return arrays


def checksum(array: npt.NDArray[Any]) -> str:
    """Return the CRC-32 of the array's bytes, to see whether it was changed on its way."""
    return f"{zlib.crc32(np.ascontiguousarray(array).data):08x}"


def check_scalars(
    scalars: Mapping[str, Any], weighted_by: str, bounds: Mapping[str, tuple[float, float]]
) -> None:
    """Raise :class:`BadReply` unless all are finite, examples positive, and ``bounds`` kept."""
    for name, value in scalars.items():
        values = value if isinstance(value, list) else [value]
        if not all(math.isfinite(number) for number in values):
            raise BadReply(f"metric {name!r} is not finite: {value}")
    for name, (low, high) in {weighted_by: (1, 2**53), **bounds}.items():
        value = scalars.get(name)
        if value is None or isinstance(value, list):
            raise BadReply(f"metric {name!r} must be one number, got {value}")
        if not low <= value <= high:
            raise BadReply(f"metric {name!r} must be in [{low:g}, {high:g}], got {value}")
