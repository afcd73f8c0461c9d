"""Files that are there whole or not at all, readable by their owner only."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


class DamagedFile(ValueError):
    """A file that is not what was written: cut off, or changed since."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` through a temporary name beside it, fsynced, then renamed."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def save_arrays(path: Path, arrays: Arrays, about: str) -> None:
    """Write named arrays and a text about them as a safetensors file with a checksum."""
    arrays = {name: np.asarray(value, order="C") for name, value in arrays.items()}
    metadata = {"about": about, "sha256": _digest(arrays, about)}
    write_atomically(path, save(arrays, metadata=metadata))


def load_arrays(path: Path) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """Return what :func:`save_arrays` wrote; raise :class:`DamagedFile` if it is not that."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = metadata["about"]
        if metadata["sha256"] != _digest(arrays, about):
            raise ValueError("its checksum differs")
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DamagedFile(f"{path} is damaged: {error}") from None
    return arrays, about


def _digest(arrays: Arrays, about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name, value in sorted(arrays.items()):
        digest.update(repr((name, value.dtype.str, value.shape)).encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()
