"""Knobs that may change from round to round: a number, or ``{first round: number}``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Knob = float | Mapping[int, float]


def at(knob: Knob, server_round: int) -> float:
    """Return the value in force in ``server_round`` (1, 2, ...).

    Examples
    --------
    >>> at({0: 1.0, 60: 0.5}, 59), at({0: 1.0, 60: 0.5}, 60), at(0.1, 7)
    (1.0, 0.5, 0.1)
    """
    if not isinstance(knob, Mapping):
        return knob
    return knob[max(first for first in knob if first <= server_round)]


def check(
    name: str,
    knob: Knob,
    *,
    above: float = -math.inf,
    low: float = -math.inf,
    high: float = math.inf,
    integer: bool = False,
    scheduled: bool = True,
) -> None:
    """Raise ``ValueError`` unless every value is finite, > ``above``, >= ``low``, <= ``high``.

    ``integer`` asks for whole numbers, ``scheduled=False`` for one number instead of a schedule.
    """
    if isinstance(knob, Mapping) and scheduled:
        if 0 not in knob or min(knob) < 0:
            raise ValueError(f"{name}: a schedule starts at round 0, got rounds {sorted(knob)}")
        values = list(knob.values())
    else:
        values = [knob]  # type: ignore[list-item]  # a mapping is refused below
    bounds = [
        f"{sign} {bound:g}"
        for sign, bound in ((">", above), (">=", low), ("<=", high))
        if math.isfinite(bound)
    ]
    for value in values:
        kind = int if integer else int | float
        number = isinstance(value, kind) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and above < value and low <= value <= high):
            what = "an integer " * integer + (" and ".join(bounds) or "finite")
            raise ValueError(f"{name} must be {what}, got {value!r}")


def step_decay(value: float, rounds: int) -> dict[int, float]:
    """Return ``value``, a tenth of it from 50 % and a hundredth from 75 % of ``rounds`` on.

    The learning-rate decay of the Delta-SGD paper (its Section 4).

    Examples
    --------
    >>> step_decay(1.0, rounds=100)
    {0: 1.0, 51: 0.1, 76: 0.01}
    """
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")
    return {0: value, rounds // 2 + 1: value / 10, (3 * rounds) // 4 + 1: value / 100}


def one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}")


def all_among(
    settings: Mapping[str, object], allowed: Mapping[str, Sequence[object]], why: str
) -> None:
    """Raise ``ValueError``, which ends in ``why``, unless each setting has an allowed value.

    What ``settings`` leaves open, or ``allowed`` does not name, is not looked at.
    """
    for name, choices in allowed.items():
        if name in settings and settings[name] not in choices:
            raise ValueError(
                f"{name} must be one of {list(choices)}, got {settings[name]!r}: {why}"
            )
