"""Exponential times: a client's request arrives at random, and so long takes its work.

    t_i = arrival_i + k_i work_i                                                (1)

arrival_i  Exp(``mean_arrival``) seconds until client i's request arrives in the round
work_i     Exp(``mean_work``) seconds for each unit of work, drawn anew in each round
k_i        local steps; FedBCD's K, epochs or steps, in FedBCD, whose default clock it is

FedBCD's active devices are those whose requests arrive first. What it gains not to wait for all is
in ``fl_strategies.bcd.latency``.

Reference: Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma, "Federated Block Coordinate Descent Scheme
for Learning Global and Personalized Models", AAAI 2021, Section 5.2, footnote 2.
"""

from __future__ import annotations

from fl_strategies.core.hyperparameters import number
from fl_strategies.core.randomness import stream
from fl_strategies.parts.virtual_clock import LONGEST, VirtualClock


class Exponential(VirtualClock):
    """(1); see the module's docstring."""

    name = "exponential"
    about = "exponential times of arrival and work"
    paper = "Wu et al., AAAI 2021"
    mean_arrival: float = number(
        default=2.0, about="Mean seconds until a request.", low=0.0, high=LONGEST
    )
    mean_work: float = number(
        default=1.0, about="Mean seconds per unit of work.", low=0.0, high=LONGEST
    )

    def begins(self, seed: int, server_round: int, client: int) -> float:
        return self._draw(seed, server_round, client)[0]

    def seconds(
        self, seed: int, server_round: int, client: int, work: float, down: int = 0, up: int = 0
    ) -> float:
        arrival, each = self._draw(seed, server_round, client)
        return arrival + work * each

    def _draw(self, seed: int, server_round: int, client: int) -> tuple[float, float]:
        arrival, work = stream(seed, "clock", server_round, client).exponential(size=2)
        return float(self.mean_arrival * arrival), float(self.mean_work * work)
