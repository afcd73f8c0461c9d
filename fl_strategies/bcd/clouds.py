"""Cloud servers and their devices: what the strategies of FedBCD share.

Each client is a device of one of V cloud servers. In a round, the active devices of a cloud server
are those whose requests come first by the virtual clock, which is a random draw
(``fl_strategies.parts.exponential`` unless another is given). The clock also tells how long the
round would have lasted (``virtual-seconds``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from fl_strategies.core.hyperparameters import (
    PerClient,
    Scalar,
    Schedule,
    choice,
    number,
    of_client,
)
from fl_strategies.core.log import LOGGER
from fl_strategies.core.randomness import share
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.schedules import at, check, values
from fl_strategies.core.vectors import Vector
from fl_strategies.parts.exponential import Exponential
from fl_strategies.parts.virtual_clock import VirtualClock
from fl_strategies.server.strategy import FederatedStrategy
from fl_strategies.solvers.local import default_training

Reduce: TypeAlias = Literal["mean", "sum"]
Assignment: TypeAlias = Literal["modulo", "blocks"]

PAPER_LOCAL: Mapping[str, Scalar] = MappingProxyType(
    {"lr": 0.005, "epochs": 5, "random-epochs": True, "batch-size": 32}
)
"""How the devices of the paper's experiments train, in addition to eqs. 4-5."""


@dataclass(frozen=True)
class CloudState:
    """What the server keeps: each client's cloud server, x^0 [d], the virtual seconds so far."""

    cloud_of: Mapping[int, int]
    origin: Vector
    seconds: float = 0.0
    left_out: tuple[int, ...] = ()
    """Clients for which a summed step has no room."""

    def devices(self, cloud: int, clients: Iterable[int]) -> list[int]:
        """Return those of ``clients`` that belong to ``cloud``, sorted."""
        return sorted(client for client in clients if self.cloud_of.get(client) == cloud)


def weight(upload: Upload, *, gamma: PerClient) -> float:
    """Return the device's gamma, its weight in a server step."""
    return of_client("gamma", gamma, upload.client)


class CloudStrategy(FederatedStrategy):
    """Base of FedBCD's strategies.

    ``fraction_train`` is the share of active devices of each cloud server, at least one of each.
    Raises ``ValueError`` if the box does not hold the initial model, if V does not divide the
    number of clients, or if a summed step is above its bound.
    """

    counts_time = True
    reports = ("virtual-seconds",)
    weight = staticmethod(weight)
    step_per_cloud: ClassVar[bool] = False
    """Whether a server step sums over the devices of one cloud server; else over all devices."""

    gamma: PerClient = number(
        default=1.0,
        about="Pull of a device's model towards its cloud server's, and its weight there.",
        above=0.0,
        per_client=True,
        sent="gamma",
    )
    eta_z: Schedule = number(
        default=0.5,
        about='Server step; <= 1 with reduce="mean", and eta_z gamma |Q| <= 1 with "sum".',
        above=0.0,
        scheduled=True,
    )
    zeta: Schedule = number(
        default=0.9,
        about="Extrapolation of the devices' steps; 0 is projected gradient descent.",
        low=0.0,
        below=1.0,
        scheduled=True,
    )
    box: float | None = number(
        default=2.0,
        about="Devices' models stay in [-box, box]^d; None: no bound.",
        above=0.0,
        optional=True,
    )
    reduce: Reduce = choice(
        default="mean",
        choices=("mean", "sum"),
        about="Whether a server step takes the mean or the sum over devices, weighted by gamma.",
    )
    repeats: int = number(default=1, about="K_z, server steps in a round.", integer=True, low=1)
    servers: int = number(
        default=1,
        about="V, cloud servers; must divide the number of clients of the first round.",
        integer=True,
        low=1,
    )
    assignment: Assignment = choice(
        default="modulo",
        choices=("modulo", "blocks"),
        about="How clients, by id, are assigned to cloud servers: the p-th client to p mod V, or in"
        " V equal blocks. A client that comes later joins the cloud server with the fewest clients;"
        ' with reduce="sum" it does not take part if eta_z gamma |Q| would then exceed 1, and the'
        " log says so.",
    )

    def __post_init__(self) -> None:
        if self.reduce == "mean":
            check("eta_z", self.eta_z, above=0.0, high=1.0, scheduled=True)
        super().__post_init__()
        for name, own in (("box", self.box or 0.0), ("extrapolation", self.zeta)):
            value = self.local.get(name, 0.0)
            if value not in (0.0, own):
                raise ValueError(f"{name} of local is this strategy's to set ({own}), got {value}")
        self._check_step(max(1, self.min_available_nodes))

    @property
    def device_clock(self) -> VirtualClock:
        """The clock of requests and work: the paper's, unless another is given."""
        return self.clock or Exponential()

    @property
    def gammas(self) -> tuple[float, ...]:
        """All values of gamma."""
        gamma = self.gamma
        return (gamma,) if isinstance(gamma, int | float) else tuple(gamma)

    @property
    def scalar_bounds(self) -> Mapping[str, tuple[float, float]]:
        return {"work": (1.0, 2.0**53)}

    def first_state(self, theta: Vector) -> CloudState:
        """Return the state of a server before any client is connected."""
        return CloudState({}, theta)

    def begin(self, state: Any, round: Round, num_rounds: int) -> Any:
        far = float(np.abs(round.theta).max())
        if self.box is not None and far > self.box:
            raise ValueError(
                f"box must hold the initial model, whose largest entry is {far:g}, got {self.box:g}"
            )
        return state

    def check_clients(self, clients: int) -> None:
        if clients % self.servers:
            raise ValueError(
                f"servers must divide the number of clients, {clients}, got {self.servers}"
            )
        self._check_step(clients)

    def _check_step(self, clients: int) -> None:
        devices = clients // self.servers if self.step_per_cloud else clients
        self._check_bound(max(self.gammas) * devices, f"|Q| = {devices} devices")

    def _check_bound(self, weight: float, whose: str) -> None:
        bound = max(values(self.eta_z)) * weight
        if self.reduce == "sum" and bound > 1.0 + 1e-9:  # weights are sums, which are rounded
            raise ValueError(
                f'eta_z * gamma * |Q| must be <= 1 with reduce="sum", got {bound:g}'
                f' for {whose}; reduce="mean" has no such bound'
            )

    def check_one_more(self, state: Any, cloud: int, gamma: float) -> None:
        """Raise ``ValueError`` if a summed step must not go over one device more of ``cloud``.

        ``gamma`` is that of the device, or the sum of several devices'.
        """
        clouds = [cloud] if self.step_per_cloud else range(self.servers)
        weight = sum(self.weight_of(state, n) for n in clouds)
        self._check_bound(weight + gamma, f"one device more, with gammas that add up to {weight:g}")

    def weight_of(self, state: Any, cloud: int) -> float:
        """Return the sum of the gammas of all devices of ``cloud``."""
        return sum(self.gamma_of(client) for client, n in state.cloud_of.items() if n == cloud)

    def gamma_of(self, client: int) -> float:
        """Return the client's gamma."""
        return of_client("gamma", self.gamma, client)

    def client_config(self, state: Any, round: Round, client: int) -> Mapping[str, Any]:
        return {"box": self.box or 0.0, "extrapolation": self.zeta}

    # ---- devices ------------------------------------------------------------------------------

    def joined(self, state: Any, client: int) -> Any:
        """Return the state once ``client``, which has its cloud server, is a device of it."""
        return state

    def on_connect(self, state: Any, clients: Collection[int]) -> Any:
        """Assign clients without a cloud server to one; a summed step may have no room for some."""
        new = sorted({*clients} - state.cloud_of.keys() - {*state.left_out})
        if not new:
            return state
        first: dict[int, int] = {}
        if not state.cloud_of:
            self.check_clients(len(new))
            size = len(new) // self.servers
            modulo = self.assignment == "modulo"
            first = {c: p % self.servers if modulo else p // size for p, c in enumerate(new)}
        state = replace(state, cloud_of={**state.cloud_of, **first})
        sizes = [list(state.cloud_of.values()).count(n) for n in range(self.servers)]
        for client in new:
            if client not in state.cloud_of:
                cloud = sizes.index(min(sizes))
                try:
                    self.check_one_more(state, cloud, self.gamma_of(client))
                except ValueError as error:  # no reason to end a run for the others
                    state = replace(state, left_out=(*state.left_out, client))
                    LOGGER.warning("client %d does not take part: %s", client, error)
                    continue
                sizes[cloud] += 1
                state = replace(state, cloud_of={**state.cloud_of, client: cloud})
            state = self.joined(state, client)
        return state

    def active(self, state: Any, round: Round, cloud: int) -> list[int]:
        """Return the connected devices of ``cloud`` that are active: those who request first."""
        devices = state.devices(cloud, round.connected)
        return self.first_to_call(round, devices, self.active_size(len(devices)))

    def active_size(self, devices: int) -> int:
        """Return how many of a cloud server's devices are active."""
        least = math.ceil(self.min_train_nodes / self.servers)
        return min(devices, max(share(self.fraction_train, devices), least))

    def asked_of(self, clients: int) -> int:
        return self.servers * self.active_size(clients // self.servers)

    def first_to_call(self, round: Round, clients: Collection[int], size: int) -> list[int]:
        """Return the ``size`` clients whose requests arrive first by the virtual clock, sorted."""
        arrival = {c: self.device_clock.begins(round.seed, round.number, c) for c in clients}
        return sorted(sorted(clients, key=lambda client: arrival[client])[:size])

    def select(self, state: Any, round: Round) -> list[int]:
        return sorted(c for n in range(self.servers) for c in self.active(state, round, n))

    def most_work(self, config: Mapping[str, Any]) -> float:
        training = default_training().updated(config)
        return training.steps or training.epochs

    def virtual_seconds(self, state: Any) -> float:
        return float(state.seconds)

    # ---- rounds -------------------------------------------------------------------------------

    def skipped(
        self, state: Any, round: Round, uploads: Sequence[Upload]
    ) -> tuple[Any, Mapping[str, float]]:
        return self.timed(state, round, uploads)

    def timed(
        self, state: Any, round: Round, uploads: Iterable[Upload]
    ) -> tuple[Any, Mapping[str, float]]:
        """Return the state at the end of the round by the virtual clock, and its seconds."""
        state = self.ended(state, round, uploads)
        return state, {"virtual-seconds": state.seconds}

    def ended(self, state: Any, round: Round, uploads: Iterable[Upload]) -> Any:
        """Return the state with the virtual seconds, from the start of the run, to its end."""
        work = {upload.client: upload.scalars["work"] for upload in uploads}
        took = self.duration(round.seed, round.number, round.asked, work)
        return replace(state, seconds=state.seconds + took)

    def duration(
        self, seed: int, server_round: int, clients: Iterable[int], work: Mapping[int, float]
    ) -> float:
        """Return the virtual seconds that the slowest of ``clients`` takes.

        ``work`` is the K of the usable replies; one without counts with K = 1.
        """
        times = [
            self.device_clock.seconds(seed, server_round, client, work.get(client, 1.0))
            for client in clients
        ]
        return max(times, default=0.0)

    def step(self, server_round: int) -> dict[str, Any]:
        """Return the arguments of a server step."""
        return {
            "rate": at(self.eta_z, server_round),
            "reduce": self.reduce,
            "repeats": self.repeats,
        }
