"""FedBCD-I: FedBCD whose devices train on their own data offline, and are pulled on contact.

Of the available devices only some are active, that is in contact. An available device trains on f_i
alone, K_i ~ U{1..K} times (ASPG), in at most ``offline_rounds`` rounds without contact:

    e  = x + zeta (x - x_prev);   x+ = Proj_X( e - eta_x grad f_i(e) )           (1)

An active device then receives z and is pulled towards it, K_i times with that round's K_i,

    x+ = Proj_X( x - gamma_i (x - z) )                                          (2)

and uploads x. The server's step goes over the active devices alone, K_z times:

    z <- z - eta_z sum_{i active} gamma_i (z - x_i)                     "sum"   (3)
    z <- z - eta_z (z - sum gamma_i x_i / sum gamma_i)                  "mean"  (4)

x, x_prev   device's model [d] and the iterate before it, kept by the device; a newcomer's is the z
            received. After (2) x_prev is the iterate before the last pull, as Algorithm 2 has it
gamma_i     pull in (0, 1], the paper's 0.2; K is as in ``fl_strategies.fedbcd``

Nothing is exchanged offline, so a device does that work inside its next message: the server draws
who is available and says in how many rounds that was since the last contact, this round's among
them and ``offline_rounds`` at most. That is the same to the number and costs no message. A round
that is void did not happen; a device asked in vain counts as available without contact.

A device that lost its state begins anew from the z it receives, and nothing else is changed.

Deviations of the authors' code: its cap lets one round more through; K counts mini-batches.

Reference: Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and
Personalized Models", AAAI 2021, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Unpack

from fl_strategies.clouds import CloudOptions, CloudStrategy
from fl_strategies.fedbcd import Sum, booked, server_rule
from fl_strategies.randomness import stream
from fl_strategies.schedules import check
from fl_strategies.strategy import Scalar, Upload
from fl_strategies.subproblem import Iterates, Solve, Subproblem, Vector


class State(NamedTuple):
    """What a device keeps: x and the iterate before it."""

    x: Vector
    previous: Vector


def first_state(z: Vector) -> State:
    """Return the state of a device that has never taken part."""
    return State(x=z, previous=z)


def train(state: State, solve: Solve, *, rounds: int) -> State:
    """Return the state after ``rounds`` rounds of (1)."""
    for _ in range(rounds):
        state = State(*solve(Iterates(*state), Subproblem()))
    return state


def pull(state: State, z: Vector, *, gamma: float, times: int, box: float | None) -> State:
    """Return the state after (2), ``times`` times."""
    for _ in range(times):
        x = state.x - gamma * (state.x - z)
        state = State(x if box is None else x.clip(-box, box), state.x)
    return state


class FedBCDI(CloudStrategy):
    """FedBCD-I's server half; see the module's docstring for the rule and every symbol.

    Parameters
    ----------
    fraction_available : float in (0, 1] (default 0.8)
        Share of each cloud server's connected devices that are available in a round; the active
        ones (``fraction_train`` of all) are among them, and are all if the share is smaller.
    offline_rounds : int >= 1 (default 4)
        Rounds that a device trains for at most between two contacts.
    **options
        Those of :class:`fl_strategies.clouds.CloudStrategy`, with gamma in (0, 1], 0.2 by default.
    """

    algorithm = "fedbcd-i"
    scalar_bounds: Mapping[str, tuple[float, float]] = MappingProxyType({"work": (1.0, 2.0**53)})
    saved = ("_offline",)

    def __init__(
        self,
        *,
        fraction_available: float = 0.8,
        offline_rounds: int = 4,
        **options: Unpack[CloudOptions],
    ) -> None:
        check("fraction_available", fraction_available, above=0.0, high=1.0)
        check("offline_rounds", offline_rounds, low=1, integer=True)
        options.setdefault("gamma", 0.2)
        super().__init__(**options)
        for gamma in self.gammas:
            check("gamma", gamma, above=0.0, high=1.0)
        self.fraction_available, self.offline_rounds = fraction_available, offline_rounds
        self._available: set[int] = set()
        self._offline: dict[int, int] = {}
        self._used: set[int] = set()

    def request(self, server_round: int, client: int) -> dict[str, Scalar]:
        rounds = min(self._offline.get(client, 0) + 1, self.offline_rounds)
        return {**super().request(server_round, client), "offline-rounds": rounds}

    def active(self, server_round: int, cloud: int, clients: Iterable[int]) -> list[int]:
        devices = self.devices(cloud, clients)
        size = self.active_size(len(devices))
        many = max(size, int(self.fraction_available * len(devices) + 1e-9))
        draw = stream(self.seed, "available", server_round, cloud)
        available = [int(client) for client in draw.permutation(devices)[:many]]
        self._available |= set(available)
        return self.first_to_call(server_round, available, size)

    def _sample(
        self, purpose: str, server_round: int, nodes: dict[int, int], fraction: float, least: int
    ) -> list[int]:
        if purpose == "sample":
            self._available = set()
        return super()._sample(purpose, server_round, nodes, fraction, least)

    def aggregate(
        self, server_round: int, theta: Vector, uploads: Iterable[Upload], used: int
    ) -> Vector:
        book, self._used = Sum(), set()
        for upload in uploads:
            gamma = self.gamma_of(upload.client)
            book = booked(book, upload.vector, gamma=gamma, devices=1)
            self._used.add(upload.client)
        (z,) = server_rule([theta], [book], **self.step(server_round))
        return z

    def commit(self, server_round: int) -> None:
        for client in self._available:
            self._offline[client] = self._offline.get(client, 0) + 1
        for client in self._used:
            self._offline[client] = 0
