"""Pace: which replies of the clients at work the server waits for, by the clock."""

from __future__ import annotations

from typing import ClassVar

from fl_strategies.parts.availability import DOES_WITHOUT_SOME, SYNCHRONOUS
from fl_strategies.parts.part import Need, Part

TIMED = Need(
    lambda rule: not rule.counts_time,
    "{rule} counts time itself, and says by its cloud servers what is waited for",
    "FedBCD, async-cloud, whose first cloud servers to finish mix, or another algorithm",
)


class Pace(Part):
    """Base of the parts that say what is waited for. All need a clock."""

    stage = "pace"
    needs: ClassVar[tuple[Need, ...]] = (SYNCHRONOUS, TIMED, DOES_WITHOUT_SOME)
