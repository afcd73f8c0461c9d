"""Tensors as NumPy arrays, the form in which they travel and are stored."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """Return ``tensor`` as an array on the host, of the type in which it travels.

    A tensor travels in its own type, except that bfloat16, which NumPy lacks, travels as float32.
    A float32 holds every bfloat16 exactly.
    """
    host = tensor.detach().cpu()
    array: npt.NDArray[Any] = (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    return array


@functools.cache
def numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the type in which tensors of ``dtype`` travel."""
    return to_numpy(torch.empty(0, dtype=dtype)).dtype


def to_host(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Return ``tensors`` as :func:`to_numpy` does; another device than a CPU copies once per type.

    Those of a CPU share the tensors' memory.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [to_numpy(tensor) for tensor in tensors]
    arrays: dict[int, npt.NDArray[Any]] = {}
    for places in _by_type(tensors):
        flat = to_numpy(torch.cat([tensors[place].detach().reshape(-1) for place in places]))
        ends = np.cumsum([tensors[place].numel() for place in places])
        for place, piece in zip(places, np.split(flat, ends[:-1]), strict=True):
            arrays[place] = piece.reshape(tuple(tensors[place].shape))
    return [arrays[place] for place in range(len(tensors))]


def copy_into(tensors: Sequence[Tensor], arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Write ``arrays`` (may be read-only) into ``tensors``; the device copies once per type."""
    for places in _by_type(tensors):
        into = [tensors[place] for place in places]
        some = [arrays[place] for place in places]
        first = into[0]
        if first.device.type == "cpu" and first.dtype != torch.bfloat16:
            for tensor, array in zip(into, some, strict=True):
                np.copyto(tensor.numpy(), array, casting="unsafe")
            continue
        flat = torch.from_numpy(np.concatenate([np.ravel(array) for array in some])).to(first)
        pieces = torch.split(flat, [tensor.numel() for tensor in into])
        views = [piece.view(t.shape) for piece, t in zip(pieces, into, strict=True)]
        torch._foreach_copy_(into, views)


def _by_type(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the positions of the tensors, grouped by type."""
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    return [*places.values()]
