"""The processes of this machine, as /proc shows them."""

from __future__ import annotations

from pathlib import Path


def processes() -> dict[int, tuple[int, int, str]]:
    """Parent, group and name by process id, of all that run; zombies do not."""
    table = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:  # gone meanwhile
            continue
        state, parent, group = rest.split()[:3]
        if state not in "ZX":
            table[int(stat.parent.name)] = (int(parent), int(group), name)
    return table


def descendants(pid: int) -> set[int]:
    """Group of each process below `pid`."""
    table, below = processes(), {pid}
    for _ in table:
        more = {child for child, (parent, _, _) in table.items() if parent in below} - below
        if not more:
            break
        below |= more
    return {table[child][1] for child in below - {pid}}


def members(group: int) -> list[str]:
    return [name for _, its_group, name in processes().values() if its_group == group]


def running_with(home: str) -> list[int]:
    """Return the processes, but for defunct ones, whose environment has this Flower home."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLWR_HOME={home}".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found
