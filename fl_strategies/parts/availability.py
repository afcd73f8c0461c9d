"""Availability: which of the connected clients are there in a round. Selection chooses among them.

    Bernoulli  P(i there in round t) = p, independent of all else               (1)
    Markov     from there to away with probability 1/on, back with 1/off        (2)
    Daily      P(i there at second v) = p + swing sin(2 pi (v/period + phase_i)) (3)

v        virtual seconds at the beginning of the round; without a clock a round lasts one second
phase_i  uniform in [0, zones): 1 spreads the clients over all time zones, 0 is one time zone

Nothing is stored. A step of (2) is a renewal with probability r = 1/on + 1/off <= 1, and then a
client is there with probability on/(on + off), the share of its time; else it stays as it was. So
its state is that of its last renewal, for which one looks back, 1/r rounds in the mean.

In training a client that is away counts as one that is not connected: ``fraction_train`` is a share
of those that are there, and a round in which nobody is there is skipped. Evaluation asks all.

Reference: (2) as in Ribero, Vikalo, de Veciana, "Federated Learning Under Intermittent Client
Availability and Time-Varying Communication Constraints", IEEE JSTSP 2023; (3) as seen by Bonawitz
et al., "Towards Federated Learning at Scale: System Design", MLSys 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

from fl_strategies.core.hyperparameters import number
from fl_strategies.core.randomness import stream
from fl_strategies.parts.part import Need, Part

BLOCK = 32
"""Rounds whose draws have one stream."""
SYNCHRONOUS = Need(
    lambda rule: not rule.overlaps,
    "{rule} has work of several rounds under way, by a clock of its own",
    "FedBCD, or an algorithm with rounds",
)


DOES_WITHOUT_SOME = Need(
    lambda rule: not rule.needs_everyone,
    "{rule} skips each round in which a client is missing",
    'missing="proceed", or an algorithm in which some take part',
)


class Availability(Part):
    """Base of the parts that say who is there."""

    stage = "availability"
    needs: ClassVar[tuple[Need, ...]] = (SYNCHRONOUS, DOES_WITHOUT_SOME)

    def is_there(self, seed: int, server_round: int, now: float, client: int) -> bool:
        """Return whether the client is there in a round that begins at second ``now``."""
        raise NotImplementedError

    def there(
        self, seed: int, server_round: int, now: float, clients: Iterable[int]
    ) -> tuple[int, ...]:
        """Return those of ``clients`` that are there."""
        return tuple(c for c in clients if self.is_there(seed, server_round, now, c))


class Bernoulli(Availability):
    """(1); see the module's docstring."""

    name = "bernoulli"
    about = "each client with one probability, anew in each round"
    paper = "Ribero et al., IEEE JSTSP 2023"
    p: float = number(default=0.9, about="Probability to be there.", above=0.0, high=1.0)

    def is_there(self, seed: int, server_round: int, now: float, client: int) -> bool:
        return bool(stream(seed, "there", server_round, client).random() < self.p)


class Markov(Availability):
    """(2); see the module's docstring."""

    name = "markov"
    about = "clients come and go, and stay for several rounds"
    paper = "Ribero et al., IEEE JSTSP 2023"
    on: float = number(default=8.0, about="Mean rounds that a client stays.", low=1.0)
    off: float = number(default=4.0, about="Mean rounds that it stays away.", low=1.0)

    def __post_init__(self) -> None:
        if 1.0 / self.on + 1.0 / self.off > 1.0:
            raise ValueError(f"1/on + 1/off must be <= 1, got on={self.on}, off={self.off}")

    def is_there(self, seed: int, server_round: int, now: float, client: int) -> bool:
        renewal, share = 1.0 / self.on + 1.0 / self.off, self.on / (self.on + self.off)
        for block in range(server_round // BLOCK, -1, -1):
            draws = stream(seed, "comes-and-goes", block, client).random((BLOCK, 2))
            last = server_round % BLOCK if block == server_round // BLOCK else BLOCK - 1
            for renews, coin in draws[last::-1].tolist():
                if renews < renewal:
                    return bool(coin < share)
        return bool(coin < share)  # since before round 0


class Daily(Availability):
    """(3); see the module's docstring."""

    name = "daily"
    about = "a daily cycle, as of phones that charge at night"
    paper = "Bonawitz et al., MLSys 2019"
    p: float = number(default=0.4, about="Mean probability to be there.", above=0.0, high=1.0)
    swing: float = number(default=0.15, about="<= p and <= 1 - p.", low=0.0, high=0.5)
    period: float = number(default=86_400.0, about="Virtual seconds of a day.", low=1e-3)
    zones: float = number(default=1.0, about="Share of a day of the phases.", low=0.0, high=1.0)

    def __post_init__(self) -> None:
        if not self.swing <= self.p <= 1.0 - self.swing:
            raise ValueError(f"p must be >= swing and <= 1 - swing, got {self.p}, {self.swing}")

    def is_there(self, seed: int, server_round: int, now: float, client: int) -> bool:
        phase = self.zones * stream(seed, "phase", client).random()
        p = self.p + self.swing * math.sin(2.0 * math.pi * (now / self.period + phase))
        return bool(stream(seed, "there", server_round, client).random() < p)
