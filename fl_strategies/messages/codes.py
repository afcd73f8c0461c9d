"""Compressed updates (``fl_strategies.parts.compression``), read without trust; and downloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fl_strategies.core.bfloat16 import halves, numbers_of
from fl_strategies.core.layout import Arrays, Layout
from fl_strategies.core.records import BadReply
from fl_strategies.messages.wire import decode as decode_array

if TYPE_CHECKING:
    from flwr.app import Array

CODEC = "compression"
"""The name, in a request and in its reply, of the codec, as :func:`asked_for` says."""
OF_CHANGES = "changes: "
"""Before the codec's text, where the uploaded vector is a change itself."""
DOWNLOAD = "download"
"""The name, in a request, of the type of the arrays that travel as bfloat16."""
SHORT = np.dtype("V2")
"""The type of arrays that travel as bfloat16. Nothing computes with it, so that a client which does
not know it fails, and never trains on something else."""
Decode = Callable[[npt.NDArray[Any], int, np.dtype[Any]], npt.NDArray[Any]]
"""``decode(code, d, dtype)`` returns the vector [d] of a code, or raises ``ValueError``."""


def asked_for(codec: object, *, changes: bool) -> str:
    """Return what clients are asked for, "topk share=0.01", with :data:`OF_CHANGES` perhaps."""
    return f"{OF_CHANGES * changes}{codec}"


def decompressed(
    record: Mapping[str, npt.NDArray[Any]],
    layout: Layout,
    extra_vectors: Sequence[str],
    decode: Decode,
    start: Arrays,
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an upload as they were before compression, ``start`` being its theta.

    Of the trained arrays of the model, and of each of the ``extra_vectors``, the first one in
    ``record`` is the code and the others are empty. The model's code is of a change from ``start``;
    with an empty ``start`` the upload is a change itself. Raises :class:`BadReply` for a broken
    code.
    """
    arrays = dict(record)
    size = sum(int(np.prod(layout.shapes[name])) for name in layout.trainable)
    no_buffers = dict.fromkeys(layout.buffers, np.empty(0))
    for prefix in ("", *(f"{name}/" for name in extra_vectors)):
        first, *others = (prefix + name for name in layout.trainable)
        others += [] if prefix else layout.copies
        code = arrays.get(first)
        if code is None or code.dtype != np.uint8 or code.ndim != 1:
            raise BadReply(f"array {first!r} is not a code")
        if any(name not in arrays or arrays[name].size for name in others):
            raise BadReply(f"arrays besides the code {first!r} are not empty")
        try:
            change = decode(np.ascontiguousarray(code), size, layout.dtype)
        except ValueError as error:
            raise BadReply(f"the code {first!r} is broken: {error}") from None
        pieces = layout.unpack(change, no_buffers)
        if start and not prefix:
            pieces |= {n: np.asarray(pieces[n] + start[n]) for n in layout.trainable}
        arrays |= {prefix + name: pieces[name] for name in layout.trainable}
    return arrays | {copy: arrays[name] for copy, name in layout.copies.items()}


# ---- downloads ----------------------------------------------------------------------------------


def shortened(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array as it travels in bfloat16."""
    return halves(array).view(SHORT)


def lengthened(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array that travelled in bfloat16, in the model's type; any other as it is."""
    return numbers_of(array.view(np.uint16), dtype) if array.dtype == SHORT else array


def received(record: Mapping[str, Array], config: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
    """Return the arrays of a request, read-only views of what came unless they are bfloat16."""
    dtype = np.dtype(config.get(DOWNLOAD, "<f4"))
    return [lengthened(decode_array(array), dtype) for array in record.values()]
