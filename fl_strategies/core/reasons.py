"""Why a client failed, in one line: the innermost exception first.

The engine turns a client's exception into text: a SuperNode sends the message alone, Ray a long
traceback that begins with the cause. ``of_exception`` is for the side where the exception is
raised, ``root_cause`` for the side that gets only the text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from logging import DEBUG, ERROR
from pathlib import Path

LONGEST = 100_000
"""The most characters of a reason that are read: the text comes from a client."""
SHOWN = 20
"""The most clients that a line names."""
NOT_FINITE = "is not finite"
"""What every reason says, a host's too, that a client's numbers overflowed."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_WRAPPED = re.compile(r"<class '([\w.]+)(?:\([\w.]*\))?'>:<'")
_FRAME = re.compile(r'^\s+File "(.*)", line (\d+), in (.+)$')
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_WRAPPER = "flwr.clientapp.client_app.ClientAppException"
"""The exception by which Flower's simulation replaces every exception of a ClientApp."""
_OTHERS_LINES = {
    ("vce_api", "worker"),
    ("raybackend", "process_message"),
    ("records", "tell"),  # of clients.node
}
"""Loggers of a client's exception if it runs beside the server; Flower logs it three times."""


def of_exception(error: BaseException) -> str:
    """Return type, message and place of the first exception, then of those that it caused."""
    chain = [error]
    while (inner := _cause(chain[-1])) is not None and inner not in chain:
        chain.append(inner)
    first, *later = reversed(chain)
    place = ""
    if (frame := first.__traceback__) is not None:
        while frame.tb_next is not None:
            frame = frame.tb_next
        code = frame.tb_frame.f_code
        place = _place(code.co_filename, frame.tb_lineno, code.co_name)
    return "; hence ".join([f"{_said(first)}{place}", *map(_said, later)])


def root_cause(reason: str | None) -> str:
    """Return the first cause in an error reply's ``reason``, and its place if the text has it.

    The first traceback in a text is that of the innermost exception. A text without a traceback
    stays as it is, without the class name that Flower puts before it.
    """
    text = _COLOUR.sub("", (reason or "no reason given")[:LONGEST])
    kind = ""
    if wrapped := _WRAPPED.match(text):
        kind = wrapped[1].rpartition(".")[2] + ": "
        text = text[wrapped.end() :].removesuffix("'>")
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if line in _CHAINED:
            blocks.append([])
        else:
            blocks[-1].append(line)
    ends = [_end_of(block) for block in blocks]
    said = [message for message, _ in ends if message and not message.startswith(_WRAPPER)]
    if not said:
        return kind + text
    return "; hence ".join([said[0] + ends[0][1], *said[1:]])


def _end_of(lines: list[str]) -> tuple[str, str]:
    """Return a traceback's exception, and the place of its last frame; "" and "" for other text."""
    frames = [(n, frame) for n, line in enumerate(lines) if (frame := _FRAME.match(line))]
    if not frames:
        return "", ""
    last, frame = frames[-1]
    # what follows a frame is indented up to the exception, whose message may have lines that are
    said = next((n for n in range(last + 1, len(lines)) if lines[n][:1].strip()), len(lines))
    return " ".join(" ".join(lines[said:]).split()), _place(frame[1], int(frame[2]), frame[3])


def by_reason(faults: Iterable[tuple[int | None, str]]) -> dict[str, list[int | None]]:
    """Return the clients of each distinct reason, ascending, for any order of replies."""
    found: dict[str, list[int | None]] = {}
    for client, reason in sorted(faults, key=lambda fault: (fault[0] or 0, fault[1])):
        found.setdefault(reason, []).append(client)
    return found


def named(ids: Iterable[int | None], what: str = "client") -> str:
    """Return ``client 3`` or ``2 clients [1, 3]``; of many, only the first are named."""
    numbers = list(ids)
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    more = ", ..." if len(numbers) > SHOWN else ""
    return f"{len(numbers)} {what}s [{', '.join(map(str, numbers[:SHOWN]))}{more}]"


@contextmanager
def said_once() -> Iterator[None]:
    """Lower the simulation's log of a client's exception to DEBUG: the strategy reports it too.

    ``FLWR_LOG_LEVEL=DEBUG`` shows the tracebacks.
    """

    def lower(record: logging.LogRecord) -> bool:
        if record.levelno == ERROR and (record.module, record.funcName) in _OTHERS_LINES:
            record.levelno, record.levelname = DEBUG, logging.getLevelName(DEBUG)
        return True

    logger = logging.getLogger("flwr")
    logger.addFilter(lower)
    try:
        yield
    finally:
        logger.removeFilter(lower)


def _cause(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    return None if error.__suppress_context__ else error.__context__


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _place(path: str, line: int, function: str) -> str:
    return f" ({Path(path).name}:{line} in {function})"
