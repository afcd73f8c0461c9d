"""Virtual clock: the base of the clocks."""

from __future__ import annotations

from collections.abc import Mapping

from fl_strategies.core.hyperparameters import number
from fl_strategies.parts.part import Part

LONGEST = 1e9
"""The most seconds of anything that lasts, so that sums of them are finite."""


class VirtualClock(Part):
    """Base of the clocks. All draws follow from seed, round and client."""

    stage = "clock"
    idle: float = number(
        default=1.0, about="Seconds of a round that asks nobody.", above=0.0, high=LONGEST
    )

    loses, links, shared = False, False, False
    """Whether replies may be lost, bytes take time, and several clients share a device."""

    def open(self) -> None:
        """Read its file, if it has one, before the run; raise ``ValueError`` for a wrong one."""

    def begins(self, seed: int, server_round: int, client: int) -> float:
        """Return the seconds until the client begins its work."""
        raise NotImplementedError

    def seconds(
        self, seed: int, server_round: int, client: int, work: float, down: int = 0, up: int = 0
    ) -> float:
        """Return the seconds until the reply is there, after ``work`` local steps."""
        raise NotImplementedError

    def together(self, ends: Mapping[int, float]) -> dict[int, float]:
        """Return the seconds until each reply, from what each client alone would take."""
        return dict(ends)

    def drops_out(self, seed: int, server_round: int, client: int) -> float | None:
        """Return the share of its time after which the client leaves; None if it answers."""
        return None
