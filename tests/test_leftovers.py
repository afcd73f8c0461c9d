"""What a writer leaves that is killed while it writes: the next write to the folder removes it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from clients import DirectoryStore, Owner
from fl_strategies.core import files
from fl_strategies.core.files import save_arrays, write_atomically

OWNER = Owner("fedadmm", "model", "run")


def write_and_die(path: Path) -> None:
    os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
    write_atomically(path, b"x" * 1000, new=path.name == "owner.json")


def killed_in_a_write(path: Path) -> list[Path]:
    """Return what a process leaves that is killed before ``path`` has its content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=write_and_die, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    left = sorted(path.parent.glob(".*.part"))
    for one in left:
        os.utime(one, (0, 0))
    assert left
    return left


def test_the_next_write_to_a_folder_removes_what_killed_writers_left(tmp_path: Path) -> None:
    for name in ("12.safetensors", "config.json", "round-00000004.safetensors"):
        killed_in_a_write(tmp_path / name)
    strange = [tmp_path / ".x.part", tmp_path / ".x.0123456789abcdef", tmp_path / "y.part"]
    for path in strange:
        path.write_text("another's")
    write_atomically(tmp_path / "summary.json", b"{}")
    assert sorted(tmp_path.iterdir()) == sorted([*strange, tmp_path / "summary.json"])


def test_a_clients_state_folder_is_clean_after_its_next_state(tmp_path: Path) -> None:
    killed_in_a_write(tmp_path / "owner.json")
    killed_in_a_write(tmp_path / "3" / "12.safetensors")
    store = DirectoryStore(tmp_path, 3)
    store.save(OWNER, 12, {"w": np.ones(2)})
    assert store.rounds(OWNER) == [12]
    assert not [*tmp_path.rglob(".*")]


@pytest.mark.skipif(files.fcntl is None, reason="files are not locked on Windows")
def test_the_file_of_a_writer_at_work_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes, also in this process; and of several with new, the first wins."""
    writing, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(handle: int) -> None:
        fsync(handle)
        if threading.current_thread() is slow_writer:
            writing.set()
            assert go_on.wait(30)

    monkeypatch.setattr(os, "fsync", slow)
    slow_writer = threading.Thread(target=save_arrays, args=(tmp_path / "a", {}, "about"))
    slow_writer.start()
    assert writing.wait(30)
    (under_way,) = tmp_path.glob(".*.part")
    os.utime(under_way, (0, 0))
    write_atomically(tmp_path / "b", b"quick")
    assert under_way.exists()
    go_on.set()
    slow_writer.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_file_that_was_just_made_stays(tmp_path: Path) -> None:
    """Its writer may be between making and locking it."""
    (left,) = killed_in_a_write(tmp_path / "a")
    os.utime(left, (time.time(), time.time()))
    write_atomically(tmp_path / "b", b"")
    assert left.exists()
