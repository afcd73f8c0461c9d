"""The processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import psutil


def living() -> list[psutil.Process]:
    """Return all processes but for zombies, with their names as ``info["name"]``."""
    found = psutil.process_iter(["name", "status"])
    return [process for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]


def descendants() -> list[psutil.Process]:
    """Return the living processes below this one."""
    below = psutil.Process().children(recursive=True)
    return [process for process in living() if process in below]


def groups(processes: Iterable[psutil.Process]) -> set[int]:
    """Return the groups of the processes."""
    found = set()
    for process in processes:
        with suppress(ProcessLookupError):  # gone meanwhile
            found.add(os.getpgid(process.pid))
    return found


def members(group: int) -> list[str]:
    """Return the names of a group's living processes."""
    return [process.info["name"] for process in living() if groups([process]) == {group}]
