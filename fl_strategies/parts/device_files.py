"""Files with a line for each device: its speed, or when it is there."""

from __future__ import annotations

import functools
from pathlib import Path

Numbers = tuple[float, ...]
Intervals = tuple[tuple[float, float], ...]


@functools.cache
def speeds(path: str) -> list[Numbers]:
    """Return the one to three numbers >= 0 of each line; raise ``ValueError`` for others."""
    try:
        rows = [tuple(map(float, line.split(","))) for line in Path(path).read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a file of numbers: {error}") from None
    if not rows or any(len(row) > 3 or min(row) < 0.0 or 0.0 in row[1:] for row in rows):
        raise ValueError(f"each line of {path} must have a number >= 0, and at most two > 0")
    return rows


@functools.cache
def intervals(path: str) -> list[Intervals]:
    """Return the intervals of each line, "0-3600 7200-10800"; raise ``ValueError`` for others."""
    try:
        lines = [
            tuple((float(begin), float(end)) for begin, end in map(_ends, line.split()))
            for line in Path(path).read_text().splitlines()
        ]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a trace: {error}") from None
    if not lines:
        raise ValueError(f"{path} has no device")
    return lines


def _ends(text: str) -> tuple[str, str]:
    begin, dash, end = text.partition("-")
    if not dash:
        raise ValueError(f"an interval is given as 0-3600, got {text!r}")
    return begin, end
