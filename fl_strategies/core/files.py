"""Files that are there whole or not at all, readable by their owner only; folders of one run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

ABOUT = "about"
"""The array that holds a file's text, in UTF-8: a header is bounded (100 MB), arrays are not."""
LOCK = "run.lock"
"""The file in a run's folder that is locked while the run lasts. It stays, and names that run."""


class DamagedFile(ValueError):
    """A file that is not what was written: cut off, changed since, or not to be read."""


def write_atomically(
    path: Path, content: bytes, *, new: bool = False, durable: bool = True
) -> None:
    """Write ``content`` to ``path`` through a temporary name beside it, fsynced, then renamed.

    With ``new`` a file that is there stays as it is: of many writers, one is first. Without
    ``durable`` it is not fsynced: it outlives the process, and not the machine.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if new:
            _link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def _link(temporary: str, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not path.exists():
            os.replace(temporary, path)


def save_arrays(path: Path, arrays: Arrays, about: str, *, durable: bool = True) -> None:
    """Write named arrays and a text about them as a safetensors file with a checksum.

    No array may be called ``about``; ``durable`` is as :func:`write_atomically` has it.
    """
    assert ABOUT not in arrays
    arrays = {name: np.asarray(value, order="C") for name, value in arrays.items()}
    arrays[ABOUT] = np.frombuffer(about.encode(), np.uint8)
    write_atomically(path, save(arrays, metadata={"sha256": _digest(arrays)}), durable=durable)


def load_arrays(path: Path) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """Return what :func:`save_arrays` wrote; raise :class:`DamagedFile` if it is not that."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata["sha256"] != _digest(arrays):
            raise ValueError("its checksum differs")
        return arrays, arrays.pop(ABOUT).tobytes().decode()
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from None
    except Exception as error:  # whatever a header made up by somebody makes its reader raise
        said = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise DamagedFile(f"{path} is damaged: {said}") from None


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(arrays.items()):
        digest.update(repr((name, value.dtype.str, value.shape)).encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()


class FolderLock:
    """What keeps a folder to one run at a time: the kernel's lock on ``run.lock`` in it.

    The kernel releases it when the process ends, however that ends. The file stays and names the
    run that held it last, which blocks nobody.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handle: int | None = None

    def take(self) -> str:
        """Lock the folder, made if need be; return the name of the run that held it last, or "".

        Raises ``ValueError`` if another run holds it, by that run's name, and if nothing can be
        written there.
        """
        self.release()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ValueError(f"the folder {self.folder} cannot be written: {error}") from None
        run, process = self._signature()
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ValueError(
                f"{self.folder} is in use by run {run} (process {process}): wait until it has"
                " ended, or choose another folder"
            ) from None
        except OSError as error:  # some file systems have no locks
            logging.getLogger("flwr").warning(
                "%s cannot be locked (%s): see to it yourself that no second run writes there",
                self.folder,
                error,
            )
        return run

    def sign(self, run: str) -> None:
        """Name the run that holds the folder."""
        assert self._handle is not None
        line = json.dumps({"run": run, "process": os.getpid()}).encode() + b"\n"
        os.pwrite(self._handle, line, 0)
        os.ftruncate(self._handle, len(line))
        os.fsync(self._handle)

    def release(self) -> None:
        """Let others have the folder."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _signature(self) -> tuple[str, str]:
        assert self._handle is not None
        try:
            line = json.loads(os.pread(self._handle, 4096, 0).split(b"\n")[0])
            return str(line["run"]), str(line["process"])
        except (ValueError, TypeError, KeyError):  # not signed yet
            return "", "unknown"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, each with the ``round`` it is of.

    Raises :class:`DamagedFile`, with the line, for what is none. A last line that was cut off, as
    a kill may leave it, is left out.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or type(row.get("round")) is not int:
                raise ValueError("it is no object with a round")
        except (ValueError, RecursionError) as error:
            raise DamagedFile(f"{path} is damaged in line {number}: {error}") from None
        rows.append(row)
    return rows
