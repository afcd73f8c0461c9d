"""Files with a line for each device: its speed, or when it is there."""

from __future__ import annotations

import functools
from pathlib import Path

from fl_strategies.core.schedules import brief, shown

Numbers = tuple[float, ...]
Intervals = tuple[tuple[float, float], ...]
MOST_BYTES = 1 << 30
"""The largest file that is read."""


@functools.cache
def speeds(key: str, path: str, longest: float, slowest: float) -> list[Numbers]:
    """Return the numbers of each line: seconds, and perhaps two links.

    The seconds are at most ``longest``, the links at least ``slowest``. Raises ``ValueError``,
    which names ``key``, for other lines and for a file that cannot be read.
    """
    return [_speeds(key, path, line, longest, slowest) for line in _lines(key, path)]


def _speeds(key: str, path: str, line: str, longest: float, slowest: float) -> Numbers:
    try:
        step, *links = row = tuple(map(float, line.split(",")))
        right = 0.0 <= step <= longest and len(links) <= 2 and all(slowest <= x for x in links)
    except ValueError:
        right = False
    if not right:
        raise ValueError(
            f"{key}: {brief(path)} is not a file of numbers: a line has one >= 0 and <="
            f" {longest:g}, and at most two more >= {slowest:g}, got {shown(line)}"
        )
    return row


@functools.cache
def intervals(key: str, path: str) -> list[Intervals]:
    """Return the intervals of each line, "0-3600 7200-10800".

    Raises ``ValueError``, which names ``key``, for other lines and for a file
    that cannot be read.
    """
    return [
        tuple(_interval(key, path, text) for text in line.split()) for line in _lines(key, path)
    ]


def _interval(key: str, path: str, text: str) -> tuple[float, float]:
    begin, _, end = text.partition("-")
    try:
        first, last = float(begin), float(end)
        right = 0.0 <= first <= last
    except ValueError:
        right = False
    if not right:
        raise ValueError(
            f"{key}: {brief(path)} is not a trace: an interval is given as 0-3600, got"
            f" {shown(text)}"
        )
    return first, last


def _lines(key: str, path: str) -> list[str]:
    """Return the lines of a regular file, at least one."""
    said = f"{key}: {brief(path)}"
    try:
        if not Path(path).is_file():
            raise ValueError(f"{said} is no regular file")
        if (size := Path(path).stat().st_size) > MOST_BYTES:
            raise ValueError(f"{said} has {size:,} bytes, at most {MOST_BYTES:,} are read")
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ValueError(f"{said} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{said} is no text: {error.reason}") from None
    if not lines:
        raise ValueError(f"{said} has no device")
    return lines
