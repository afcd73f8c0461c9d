"""What a NumPyClient takes and gives, as Flower's records hold it."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array
from flwr.client import NumPyClient
from flwr.common.constant import SType


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


def check_names(client: NumPyClient, received: list[str]) -> None:
    """Raise ``ValueError`` unless the arrays ``received`` begin with those of the client's model.

    One that does not know their names (``array_names``, as ours do) takes any.
    """
    expected = getattr(client, "array_names", received)
    if received[: len(expected)] != expected:
        raise ValueError(
            f"the client's model shares arrays {expected}, {received} were received: begin with"
            " ArrayRecord(model.state_dict()) of a FlatModel like the clients'"
        )


def divided(samples: int, metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return numbers and texts of what ``fit`` or ``evaluate`` reports, as records hold them."""
    numbers: dict[str, Any] = {"num-examples": samples}
    words: dict[str, Any] = {}
    for name, value in metrics.items():
        plain = value.item() if isinstance(value, np.generic) else value
        (words if isinstance(plain, str | bytes | bool) else numbers)[name] = plain
    return numbers, words
