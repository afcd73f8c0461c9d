"""Why a client failed, in one line: the innermost exception first, and the user's line of code."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb

SHOWN = 20
"""The most clients that a line names."""
LARGEST_ID = 10**9
"""A larger id of a client is the random id of its node, which tells a person nothing."""
TRACEBACK = "; FLWR_LOG_LEVEL=DEBUG shows the client's traceback"
"""Ends the line of a client's error."""
NOT_FINITE = "is not finite"
"""What every reason says, a host's too, that a client's numbers overflowed."""

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
    while (inner := _cause(chain[0])) is not None and inner not in chain:
        chain.insert(0, inner)
    places = [place for each in chain for place in _places(each)]
    users = [place for place in places if _is_users(place[0])]
    first, *others = map(_message, chain)
    for path, line, function in [*users, *_places(chain[0])][:1]:
        first += f" ({Path(path).name}:{line} in {function})"
    return "; hence ".join([first, *others])


def _places(error: BaseException) -> list[tuple[str, int, str]]:
    """Return path, line and function of each frame, the innermost first."""
    codes = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    return [(code.co_filename, line, code.co_name) for code, line in reversed(codes)]


def _is_users(path: str) -> bool:
    """Return whether a file is the user's: not of this package, an installed package or Python."""
    installed = "site-packages" in path or "dist-packages" in path
    return not installed and not path.startswith(_NOT_USERS)


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


def _cause(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    return None if error.__suppress_context__ else error.__context__


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
