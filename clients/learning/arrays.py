"""Tensors as arrays, as they travel and are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """Return ``tensor`` as an array on the host, of the type by which it travels.

    That is its own, but float32 for bfloat16, which NumPy lacks: it holds every bfloat16 exactly.
    """
    host = tensor.detach().cpu()
    array: npt.NDArray[Any] = (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    return array


def numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the type by which tensors of ``dtype`` travel."""
    return to_numpy(torch.empty(0, dtype=dtype)).dtype


def copy_into(tensor: Tensor, array: npt.NDArray[Any]) -> None:
    """Write ``array``, which may be read-only, into ``tensor``."""
    if tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16:
        np.copyto(tensor.numpy(), array, casting="unsafe")
    else:  # torch wants writable memory, which bytes from the wire are not
        tensor.copy_(torch.from_numpy(array if array.flags.writeable else array.copy()))
