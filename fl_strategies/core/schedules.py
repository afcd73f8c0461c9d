"""Hyperparameters that may change from round to round: a number, or ``{first round: number}``.

Rounds are those that the log prints: 1 is the first, a second ``start`` counts on, and FedPD counts
its communication rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

Schedule: TypeAlias = float | Mapping[int, float]
"""A number, or ``{first round: number}``, rounds as the log prints them: 1, 2, ..."""


def at(value: Schedule, server_round: int) -> float:
    """Return the value in ``server_round`` (1, 2, ...; before round 1, that of round 1).

    Examples
    --------
    >>> at({1: 1.0, 60: 0.5}, 59), at({1: 1.0, 60: 0.5}, 60), at(0.1, 7)
    (1.0, 0.5, 0.1)
    """
    if not isinstance(value, Mapping):
        return value
    return value[max((first for first in value if first <= server_round), default=1)]


def values(value: Schedule) -> list[float]:
    """Return all numbers of ``value``, a number or a schedule."""
    return list(value.values()) if isinstance(value, Mapping) else [value]


def check(
    name: str,
    value: Schedule,
    *,
    above: float = -math.inf,
    low: float = -math.inf,
    high: float = math.inf,
    below: float = math.inf,
    integer: bool = False,
    scheduled: bool = False,
) -> None:
    """Raise ``ValueError`` unless the value is a finite number within the bounds.

    The bounds are > ``above``, >= ``low``, <= ``high``, < ``below``; ``integer`` requires a whole
    number. ``scheduled`` allows a schedule; all its values must be such numbers. NumPy's numbers
    are numbers.
    """
    value = plain(value)
    if isinstance(value, Mapping) and scheduled:
        if strange := [first for first in value if type(first) is not int]:
            raise ValueError(f"{name}: a schedule's rounds are integers, got {strange}")
        if min(value, default=0) != 1:
            raise ValueError(f"{name}: a schedule starts at round 1, got rounds {sorted(value)}")
    bounds = [
        f"{sign} {bound:g}"
        for sign, bound in ((">", above), (">=", low), ("<=", high), ("<", below))
        if math.isfinite(bound)
    ]
    settings: Sequence[Any] = values(value) if scheduled else [value]
    for setting in settings:
        kind = int if integer else int | float
        number = isinstance(setting, kind) and not isinstance(setting, bool) and _finite(setting)
        if not (number and above < setting < below and low <= setting <= high):
            what = ["an integer"] if integer else [] if number else ["a finite number"]
            what += [" and ".join(bounds)] if bounds else []
            or_schedule = ", or a schedule {1: number, ...}" if scheduled and not number else ""
            raise ValueError(f"{name} must be {' '.join(what)}{or_schedule}, got {shown(setting)}")


def plain(value: Any) -> Any:
    """Return ``value`` with Python's numbers in place of NumPy's, also in a mapping or an array.

    Examples
    --------
    >>> plain({np.int64(1): np.float64(0.5)}), plain(np.int64(3)), plain("adam")
    ({1: 0.5}, 3, 'adam')
    """
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def require(holds: bool, name: str, must: str, value: object) -> None:
    """Raise ``ValueError``, which says what ``name`` must be, unless ``holds``."""
    if not holds:
        raise ValueError(f"{name} must be {must}, got {shown(value)}")


LONGEST = 80
"""The most characters of a value that a message shows."""


def shown(value: object) -> str:
    """Return ``value`` as one short line, whatever it is.

    Of a long text the beginning is shown, and of a long number the size; anything else that is
    long, that has an address or that has no text is shown by its type.

    Examples
    --------
    >>> shown("a\\nb"), shown("x" * 100_000)
    ("'a\\\\nb'", "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'... (100,000 characters)")
    >>> shown(10**400), shown([7] * 1000)
    ('an integer of 401 digits', 'list(...)')
    """
    if isinstance(value, str | bytes | bytearray):
        text = repr(value[:LONGEST])
        if len(value) <= LONGEST and len(text) <= LONGEST:
            return text
        return f"{text[:42]}{text[0]}... ({len(value):,} characters)"
    if isinstance(value, int) and abs(value) >= 10**LONGEST:
        return f"an integer of {math.floor(value.bit_length() * math.log10(2)) + 1} digits"
    try:
        text = repr(value)
    except Exception:  # an object of a user's, or an integer in it that is too long
        text = ""
    short = 0 < len(text) <= LONGEST and text.isprintable() and " at 0x" not in text
    return text if short else f"{type(value).__name__}(...)"


def brief(text: str, most: int = 150) -> str:
    """Return another's ``text`` as one line of at most ``most`` characters.

    Examples
    --------
    >>> brief("no such\\noption", 12)
    'no such o...'
    """
    line = "".join(c if c.isprintable() else " " for c in text[: 10 * most])
    line = " ".join(line.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def step_decay(value: float, rounds: int) -> dict[int, float]:
    """Return a schedule: ``value``, a tenth of it after 50 % of ``rounds``, a hundredth after 75 %.

    The learning-rate decay of the Delta-SGD paper (its Section 4).

    Examples
    --------
    >>> step_decay(1.0, rounds=100)
    {1: 1.0, 51: 0.1, 76: 0.01}
    """
    check("value", value, low=0.0)
    check("rounds", rounds, low=1, integer=True)
    half, three_quarters = -(-rounds // 2), -(-3 * rounds // 4)
    return {1: value, half + 1: value / 10, three_quarters + 1: value / 100}


def linear_decay(value: float, to: float, rounds: int) -> dict[int, float]:
    """Return a schedule on the line from ``value`` in round 1 to ``to`` in round ``rounds``.

    The schedule stays there afterwards.

    Examples
    --------
    >>> linear_decay(1.0, 0.5, rounds=3)
    {1: 1.0, 2: 0.75, 3: 0.5}
    """
    shares = _shares(value, to, rounds)
    return {t: (1 - share) * value + share * to for t, share in shares.items()}


def cosine_decay(value: float, to: float, rounds: int) -> dict[int, float]:
    """As :func:`linear_decay`, along half a cosine: slowly at both ends.

    Loshchilov, Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017, eq. 5.

    Examples
    --------
    >>> cosine_decay(1.0, 0.0, rounds=3)
    {1: 1.0, 2: 0.5, 3: 0.0}
    """
    shares = {t: (1 - math.cos(math.pi * s)) / 2 for t, s in _shares(value, to, rounds).items()}
    return {t: (1 - share) * value + share * to for t, share in shares.items()}


def exponential_decay(value: float, to: float, rounds: int) -> dict[int, float]:
    """As :func:`linear_decay`, by the same factor from each round to the next; both are > 0.

    Examples
    --------
    >>> exponential_decay(1.0, 0.25, rounds=3)
    {1: 1.0, 2: 0.5, 3: 0.25}
    """
    check("value", value, above=0.0)
    check("to", to, above=0.0)
    return {t: value ** (1 - s) * to**s for t, s in _shares(value, to, rounds).items()}


DECAYS: Mapping[str, Callable[..., dict[int, float]]] = {
    function.__name__: function
    for function in (step_decay, linear_decay, cosine_decay, exponential_decay)
}
"""The functions that make schedules, by their names in texts."""


def _shares(value: float, to: float, rounds: int) -> dict[int, float]:
    """Return the share of the way that lies behind round t = 1, ..., ``rounds``: from 0 to 1."""
    check("value", value)
    check("to", to)
    check("rounds", rounds, low=1, integer=True)
    return {t: (t - 1) / max(rounds - 1, 1) for t in range(1, rounds + 1)}


def check_flag(name: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be bool, got {shown(value)}")


def one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {shown(value)}")


def check_names(cls: type, attribute: str) -> None:
    """Raise ``TypeError`` unless the class's ``attribute`` is a tuple or list of texts."""
    names = getattr(cls, attribute)
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        told = f"{cls.__name__}.{attribute} must be a tuple of names"
        raise TypeError(f"{told}, as ('c',), got {shown(names)}")


def all_among(
    settings: Mapping[str, object], allowed: Mapping[str, Sequence[object]], why: str
) -> None:
    """Raise ``ValueError``, which ends in ``why``, unless each setting has an allowed value.

    A setting that is None, or that ``allowed`` does not name, is not checked. A setting without
    allowed values must be None.
    """
    for name, choices in allowed.items():
        if (value := settings.get(name)) is not None and value not in choices:
            must = "not be set" if not choices else f"be one of {list(choices)}"
            must = f"be {choices[0]!r}" if len(choices) == 1 else must
            raise ValueError(f"{name} must {must}, got {shown(value)}: {why}")
