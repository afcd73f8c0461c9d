"""Pace: which replies of the clients at work the server waits for."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

from fl_strategies.core.hyperparameters import choice
from fl_strategies.parts.availability import DOES_WITHOUT_SOME, SYNCHRONOUS
from fl_strategies.parts.part import Need, Part

TIMED = Need(
    lambda rule: not rule.counts_time,
    "{rule} counts time itself, and says by its cloud servers what is waited for",
    "FedBCD, async-cloud, whose first cloud servers to finish mix, or another algorithm",
)


class Pace(Part):
    """Base of the parts that say what is waited for, by the clock or in real time."""

    stage = "pace"
    common: ClassVar[Collection[str]] = ("order",)
    needs: ClassVar[tuple[Need, ...]] = (SYNCHRONOUS, TIMED, DOES_WITHOUT_SOME)
    order: Literal["virtual", "arrival"] = choice(
        default="virtual",
        choices=("virtual", "arrival"),
        about="Which replies are the first: by the clock, or by real arrival.",
    )
    seconds: float | None = None
    """After which a round does not wait, if there is such a limit."""
