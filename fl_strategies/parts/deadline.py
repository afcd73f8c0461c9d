"""Deadline and over-selection: the server does not wait for late clients.

    asked = ceil(over_select |S|)                                               (1)
    used  = the first |S| replies, of those that are there by the deadline      (2)
    T     = when the last of |S| is there; else the deadline, or the end of all work if sooner (3)
    k_i   <= the steps that client i has time for, at least one, with ``cut``   (4)

|S|    clients that are asked without a part
T      seconds of the round
order  "virtual": by the clock. "arrival": in real seconds, without a clock; a client that is late
       is not asked again before it has answered or its message has expired

A late reply is not used: by the acknowledged rounds its client undoes the work, and nothing of it
is left, neither in sums that must add up nor in the client's state. By (4) a request says how many
local steps fit (``step-limit``): FedNova and FedADMM are made for such work. The time of an upload
is then that of a whole model. By arrival a host answers for all of its clients at once: they count
together, and are late together.

The clients that are used are the fast ones: with few of many asked, the model is theirs.

Reference: (1)-(3) as in Bonawitz et al., "Towards Federated Learning at Scale: System Design",
MLSys 2019, which asks 130 % of the clients that it needs; (4) as in Li et al., "Federated
Optimization in Heterogeneous Networks", MLSys 2020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fl_strategies.core.hyperparameters import flag, number
from fl_strategies.parts.pace import Pace
from fl_strategies.parts.virtual_clock import VirtualClock


class Deadline(Pace):
    """(1)-(4); see the module's docstring."""

    name = "deadline"
    about = "late replies are not used, and more clients are asked than needed"
    paper = "Bonawitz et al., MLSys 2019"
    seconds: float | None = number(
        default=None, about="Seconds of a round; by default there is no limit.", above=0.0
    )
    over_select: float = number(
        default=1.0, about="Clients that are asked for each one that counts.", low=1.0, high=1e3
    )
    cut: bool = flag(default=False, about="Whether requests limit the steps to those that fit.")

    def __post_init__(self) -> None:
        if self.cut and self.seconds is None:
            raise ValueError("cut needs seconds, by which the work is to end")
        if self.cut and self.order == "arrival":
            raise ValueError(
                'cut needs order="virtual", whose clock knows what a step takes, got "arrival"'
            )

    def asked(self, wanted: int, there: int) -> int:
        """Return how many of the clients that are ``there`` are asked, by (1)."""
        return min(there, math.ceil(self.over_select * wanted - 1e-9))

    def first(
        self, replies: Mapping[int, float], lost: Mapping[int, float], wanted: int
    ) -> tuple[list[int], float]:
        """Return the clients whose replies are used, by (2), and T, by (3).

        ``replies`` are the seconds of those that come, ``lost`` the seconds after which the server
        knows that the others do not.
        """
        limit = math.inf if self.seconds is None else self.seconds
        rounded = limit * (1.0 + 1e-9)  # k steps may take k times their seconds and a rounding
        in_time = sorted((end, client) for client, end in replies.items() if end <= rounded)
        used = [client for _, client in in_time[:wanted]]
        if used and len(used) == wanted:
            return used, replies[used[-1]]
        return used, min(limit, max([*replies.values(), *lost.values()], default=0.0))

    def steps(
        self, clock: VirtualClock, seed: int, server_round: int, client: int, down: int, up: int
    ) -> int:
        """Return the client's most steps by (4); 0 for no limit."""
        if not self.cut or self.seconds is None:
            return 0
        about = seed, server_round, client
        rest = clock.seconds(*about, 0, down, up)
        each = clock.seconds(*about, 1, down, up) - rest
        if each <= 0.0:
            return 0
        return max(1, math.floor(min((self.seconds - rest) / each + 1e-9, 2.0**31)))
