"""Knobs that may change from round to round: a number, or ``{first round: number}``."""

from __future__ import annotations

import math
from collections.abc import Mapping

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
) -> None:
    """Raise ``ValueError`` unless every value is finite, > ``above``, >= ``low``, <= ``high``."""
    if isinstance(knob, Mapping):
        if 0 not in knob or min(knob) < 0:
            raise ValueError(f"{name}: a schedule starts at round 0, got rounds {sorted(knob)}")
        values = list(knob.values())
    else:
        values = [knob]
    bounds = [
        f"{sign} {bound:g}"
        for sign, bound in ((">", above), (">=", low), ("<=", high))
        if math.isfinite(bound)
    ]
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and above < value and low <= value <= high):
            raise ValueError(f"{name} must be {' and '.join(bounds) or 'finite'}, got {value!r}")


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
