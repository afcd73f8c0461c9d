"""Files that are written completely or not at all, for their owner only; folders of one run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from filelock import BaseFileLock, FileLock, Timeout
from safetensors import safe_open
from safetensors.numpy import save

from fl_strategies.core.log import LOGGER

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

ABOUT = "about"
"""The array that holds a file's text, in UTF-8: a header is limited to 100 MB, an array is not."""
LOCK, HOLDER = "run.lock", "run.json"
"""The file in a run's folder that is locked during the run, and the file that names that run. They
are two, as on Windows nobody can read a file that another process has locked."""


LEFTOVER = re.compile(r"\..+\.[0-9a-f]{16}\.part")
"""The names of temporary files."""
JUST_MADE = 1.0
"""Seconds after which a temporary file is locked, if its writer lives."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What the system says of a full disk, and of a user who has used up their share."""


class DamagedFile(ValueError):
    """A file is not what was written: it is cut off, was changed, or cannot be read."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name ``path`` in an ``OSError`` of the system: that of a full disk names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_atomically(
    path: Path, content: bytes, *, new: bool = False, durable: bool = True, private: bool = False
) -> None:
    """Write ``content`` to ``path`` through a temporary name next to it, fsynced, then renamed.

    A process that is killed leaves its temporary file, which the next write to the folder removes.
    With ``new`` an existing file stays as it is: of several writers, the first one wins. Without
    ``durable`` neither the file nor its folder is fsynced: the file survives a crash of the
    process, not of the machine. A ``private`` file is this user's alone, others have the rights of
    any new file. An ``OSError`` names ``path``.
    """
    with naming(path):
        _write_atomically(path, content, new=new, durable=durable, mode=0o600 if private else 0o666)


def _write_atomically(path: Path, content: bytes, *, new: bool, durable: bool, mode: int) -> None:
    _remove_leftovers(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            _lock(file)
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows renames no open file
            if new:
                _link(temporary, path)
            else:
                os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    if durable and hasattr(os, "O_DIRECTORY"):  # else folders cannot be opened
        handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed writers: those that no process has locked."""
    for entry in os.scandir(folder):
        if LEFTOVER.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            with suppress(OSError), open(entry.path, "rb") as file:
                old = time.time() - os.fstat(file.fileno()).st_mtime > JUST_MADE
                if old and _lock(file):
                    os.unlink(entry.path)


def _lock(file: IO[bytes]) -> bool:
    """Lock an open file until it is closed; return whether no other process has locked it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or a file system without locks
        return False
    return True


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not path.exists():
            os.replace(temporary, path)


def save_arrays(path: Path, arrays: Arrays, about: str, *, durable: bool = True) -> None:
    """Write named arrays and a text about them as a safetensors file with a checksum.

    An array must not be called ``about``; ``durable`` is that of :func:`write_atomically`.
    """
    assert ABOUT not in arrays
    arrays = {name: np.asarray(value, order="C") for name, value in arrays.items()}
    arrays[ABOUT] = np.frombuffer(about.encode(), np.uint8)
    content = save(arrays, metadata={"sha256": _digest(arrays)})
    write_atomically(path, content, durable=durable, private=True)


def load_arrays(path: Path) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """Return what :func:`save_arrays` wrote; raise :class:`DamagedFile` if the file differs."""
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
        fault = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise DamagedFile(f"{path} is damaged: {fault}") from None


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(arrays.items()):
        digest.update(repr((name, value.dtype.str, value.shape)).encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()


class FolderLock:
    """Keeps a folder to one run at a time, by the kernel's lock on its file ``run.lock``.

    The kernel releases the lock when the process ends, in any way. The file ``run.json`` remains
    and names the run that held the lock last; this blocks nobody.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: BaseFileLock | None = None

    @contextmanager
    def held(self, run: str) -> Iterator[None]:
        """Hold the folder inside the block, in the name of ``run``; errors of :meth:`take`."""
        self.take()
        self.sign(run)
        try:
            yield
        finally:
            self.release()

    def take(self) -> str:
        """Make the folder if needed and lock it; return the run that held it last, or "".

        Raises ``ValueError``, which names the run, if another run holds the folder, and if nothing
        can be written there.
        """
        self.release()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise ValueError(f"the folder {self.folder} cannot be written: {error}") from None
        path = self.folder / LOCK
        lock = FileLock(path, mode=0o600, timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
            self._lock = lock
        except Timeout:
            run, process = self._signature()
            raise ValueError(
                f"{self.folder} is in use by run {run} (process {process}): wait until it has"
                " ended, or choose another folder"
            ) from None
        except PermissionError as error:
            raise ValueError(f"{path} cannot be locked: {error}") from None
        except OSError as error:  # some file systems have no locks
            LOGGER.warning(
                "%s cannot be locked (%s): make sure that no second run writes there",
                self.folder,
                error,
            )
        return self._signature()[0]

    def sign(self, run: str) -> None:
        """Name the run that holds the folder."""
        line = json.dumps({"run": run, "process": os.getpid()}) + "\n"
        write_atomically(self.folder / HOLDER, line.encode())

    def release(self) -> None:
        """Release the folder for other runs."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _signature(self) -> tuple[str, str]:
        try:
            holder = json.loads((self.folder / HOLDER).read_bytes())
            return str(holder["run"]), str(holder["process"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):  # not signed yet
            return "", "unknown"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, each with its ``round``.

    Raises :class:`DamagedFile`, with the line, for a line that is not such an object. An incomplete
    last line, which a killed process may leave, is skipped.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or type(row.get("round")) is not int:
                raise ValueError("it is not an object with a round")
        except (ValueError, RecursionError) as error:
            raise DamagedFile(f"{path} is damaged in line {number}: {error}") from None
        rows.append(row)
    return rows
