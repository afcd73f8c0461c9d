"""Why a client failed, in one line: the innermost exception first, and the user's line of code.

The engine turns a client's exception into text: a SuperNode sends the message alone, Ray a long
traceback that begins with the cause. ``of_exception`` is for the side where the exception is
raised, ``root_cause`` for the side that gets only the text.
"""

from __future__ import annotations

import functools
import logging
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from logging import DEBUG, ERROR
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple, ParamSpec, TypeVar

from fl_strategies.core.log import FLOWER, LOGGER, quiet_log

P = ParamSpec("P")
T = TypeVar("T")

LONGEST = 100_000
"""The most characters of a reason that are read: the text comes from a client."""
SHOWN = 20
"""The most clients that a line names."""
LARGEST_ID = 10**9
"""A larger id of a client is the random id of its node, which tells a person nothing."""
TRACEBACK = "; FLWR_LOG_LEVEL=DEBUG shows the client's traceback"
"""Ends the line of a client's error."""
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
    ("records", "log_failure"),  # of clients.node
}
"""Loggers of a client's exception on the server's machine, where Flower logs it three times."""


class _Frame(NamedTuple):
    """A line of a traceback."""

    path: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether the line is the user's: not of this package, an installed package or Python."""
        path = self.path
        installed = "site-packages" in path or "dist-packages" in path
        return not installed and not path.startswith(_NOT_USERS)

    def __str__(self) -> str:
        return f" ({Path(self.path).name}:{self.line} in {self.function})"


_PACKAGE = Path(__file__).parents[1]
_NOT_USERS = (
    "<frozen ",
    *(f"{folder}/" for folder in (_PACKAGE, _PACKAGE.parent / "clients")),
    f"{sysconfig.get_path('stdlib')}/",
)


def of_exception(error: BaseException) -> str:
    """Return type and message of the first exception, the place, and those that it caused.

    The place is the last line of the user's own code; without one, where it was raised.
    """
    chain = [error]
    while (inner := _cause(chain[-1])) is not None and inner not in chain:
        chain.append(inner)
    return _one_line((_message(e), _frames(e)) for e in reversed(chain))


def _frames(error: BaseException) -> list[_Frame]:
    codes = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    return [_Frame(code.co_filename, line, code.co_name) for code, line in codes]


def _one_line(exceptions: Iterable[tuple[str, list[_Frame]]]) -> str:
    """Return one line of messages and their frames, the first cause first."""
    (first, raised), *later = exceptions
    everywhere = [raised, *(frames for _, frames in later)]
    users = [frame for frames in everywhere for frame in reversed(frames) if frame.is_users]
    place = next((str(frame) for frame in [*users, *reversed(raised)]), "")
    return "; hence ".join([first + place, *(message for message, _ in later)])


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
    ends = [_read(block) for block in blocks]
    causes = [end for end in ends if end[0] and not end[0].startswith(_WRAPPER)]
    return _one_line(causes) if causes else kind + text


def _read(lines: list[str]) -> tuple[str, list[_Frame]]:
    """Return a traceback's exception and frames; "" and none for other text."""
    frames = [(n, frame) for n, line in enumerate(lines) if (frame := _FRAME.match(line))]
    if not frames:
        return "", []
    last = frames[-1][0]
    # what follows a frame is indented up to the exception, whose message may have lines that are
    first = next((n for n in range(last + 1, len(lines)) if lines[n][:1].strip()), len(lines))
    message = " ".join(" ".join(lines[first:]).split())
    return message, [_Frame(frame[1], int(frame[2]), frame[3]) for _, frame in frames]


def by_reason(faults: Iterable[tuple[int | None, str]]) -> dict[str, list[int | None]]:
    """Return the clients of each distinct reason, ascending, for any order of replies."""
    clients: dict[str, list[int | None]] = {}
    for client, reason in sorted(faults, key=lambda fault: (fault[0] or 0, fault[1])):
        clients.setdefault(reason, []).append(client)
    return clients


def named(ids: Iterable[int | None], what: str = "client") -> str:
    """Return ``client 3`` or ``2 clients [1, 3]``; of many, only the first are named.

    If they are known by their nodes' ids, they are counted: ``2 clients``.
    """
    numbers = list(ids)
    if len(numbers) == 1:
        return f"{what} {brief(numbers[0])}"
    if any((number or 0) > LARGEST_ID for number in numbers):
        return f"{len(numbers)} {what}s"
    more = ", ..." if len(numbers) > SHOWN else ""
    return f"{len(numbers)} {what}s [{', '.join(map(str, numbers[:SHOWN]))}{more}]"


def brief(number: int | None) -> str:
    """Return an id for a person to read; of a node's random id, the last four digits.

    Examples
    --------
    >>> brief(12), brief(17283940560123456789)
    ('12', '…6789')
    """
    return str(number) if (number or 0) <= LARGEST_ID else f"…{str(number)[-4:]}"


@contextmanager
def reported_once() -> Iterator[None]:
    """Lower the simulation's log of a client's exception to DEBUG: the strategy reports it too.

    ``FLWR_LOG_LEVEL=DEBUG`` shows the tracebacks.
    """

    def lower(record: logging.LogRecord) -> bool:
        if record.levelno == ERROR and (record.module, record.funcName) in _OTHERS_LINES:
            record.levelno, record.levelname = DEBUG, logging.getLevelName(DEBUG)
        return True

    for logger in (FLOWER, LOGGER):
        logger.addFilter(lower)
    try:
        yield
    finally:
        for logger in (FLOWER, LOGGER):
            logger.removeFilter(lower)


def in_one_log(start: Callable[P, T]) -> Callable[P, T]:
    """Have a method report each error once, and no rounds if the strategy is ``quiet``."""

    @functools.wraps(start)
    def started(*args: P.args, **kwargs: P.kwargs) -> T:
        strategy: Any = args[0]
        with reported_once(), quiet_log(strategy.quiet):
            return start(*args, **kwargs)

    return started


def _cause(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    return None if error.__suppress_context__ else error.__context__


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
