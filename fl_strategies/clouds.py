"""Cloud servers and their devices: what the strategies of FedBCD share.

Each client is a device of one of V cloud servers. A round's active devices are, per cloud server,
those whose requests come first by the virtual clock (``fl_strategies.latency``), which is as good
as a draw; the clock also tells how long the round would have lasted (``virtual-seconds``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from logging import WARNING
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, Unpack

import numpy as np
from flwr.common import log

from fl_strategies.latency import Clock
from fl_strategies.schedules import Knob, at, check, one_of, values
from fl_strategies.strategy import FederatedStrategy, Knobs, Options, Scalar, Upload
from fl_strategies.subproblem import Vector

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message, MetricRecord

Reduce: TypeAlias = Literal["mean", "sum"]
Assignment: TypeAlias = Literal["modulo", "blocks"]


class CloudOptions(Options, total=False):
    """The arguments of :class:`CloudStrategy`, documented there."""

    gamma: float | Sequence[float]
    eta_z: Knob
    zeta: float
    box: float | None
    reduce: Reduce
    repeats: int
    servers: int
    assignment: Assignment


class CloudStrategy(FederatedStrategy):
    """Base of FedBCD's strategies.

    Parameters
    ----------
    gamma : float > 0, or a sequence of them by client id (default 1.0)
        Pull of a device's model towards its cloud server's, and its weight there.
    eta_z : float or {first round: float}, > 0 (default 0.5)
        Server step; <= 1 with ``reduce="mean"``, and eta_z gamma |Q| <= 1 with ``"sum"``.
    zeta : float or {first round: float}, in [0, 1) (default 0.9)
        Extrapolation of the devices' steps; 0 is projected gradient descent.
    box : float > 0 or None (default 2.0)
        Devices' models stay in [-box, box]^d; None: no bound.
    reduce : "mean" or "sum" (default "mean")
        Whether a server step takes the mean or the sum over devices, weighted by gamma.
    repeats : int >= 1 (default 1)
        K_z, server steps in a round.
    servers : int >= 1 (default 1)
        V, cloud servers; must divide the number of clients of the first round.
    assignment : "modulo" or "blocks" (default "modulo")
        Whether the p-th client, by id, belongs to cloud server p mod V, or p-th of V equal blocks.
        A client that comes later joins the cloud server with the fewest.
    **options
        Those of :class:`fl_strategies.FederatedStrategy`; ``fraction_train`` is the share of
        active devices of each cloud server, at least one of each.

    Raises
    ------
    ValueError
        For a knob outside its range, a box without the initial model, clients that V does not
        divide, or a summed step above its bound.
    """

    scalar_bounds: Mapping[str, tuple[float, float]] = MappingProxyType(
        {"work": (1.0, 2.0**53), "fresh": (0.0, 1.0)}
    )
    clock: Clock = Clock()
    """The virtual clock; assign another to a strategy before it starts."""
    step_per_cloud: ClassVar[bool] = False
    """Whether a server step goes over one cloud server's devices, not over all."""
    saved: ClassVar[tuple[str, ...]] = ("_cloud_of", "_origin", "_seconds")

    def __init__(
        self,
        *,
        gamma: float | Sequence[float] = 1.0,
        eta_z: Knob = 0.5,
        zeta: Knob = 0.9,
        box: float | None = 2.0,
        reduce: Reduce = "mean",
        repeats: int = 1,
        servers: int = 1,
        assignment: Assignment = "modulo",
        **options: Unpack[Options],
    ) -> None:
        self.gammas = (gamma,) if isinstance(gamma, int | float) else tuple(gamma)
        for value in self.gammas:
            check("gamma", value, above=0.0)
        one_of("reduce", reduce, ("mean", "sum"))
        one_of("assignment", assignment, ("modulo", "blocks"))
        high = 1.0 if reduce == "mean" else math.inf
        check("eta_z", eta_z, above=0.0, high=high, scheduled=True)
        check("zeta", zeta, low=0.0, below=1.0, scheduled=True)
        if box is not None:
            check("box", box, above=0.0)
        check("repeats", repeats, low=1, integer=True)
        check("servers", servers, low=1, integer=True)
        super().__init__(**options)
        for name, own in (("box", box or 0.0), ("extrapolation", zeta)):
            given = self.local.get(name, 0.0)
            if given != 0.0 and given != own:
                raise ValueError(f"{name} of local is this strategy's to set ({own}), got {given}")
        self.gamma, self.eta_z, self.zeta, self.box = gamma, eta_z, zeta, box
        self.reduce, self.repeats, self.servers = reduce, repeats, servers
        self.assignment = assignment
        self._check_step(max(1, self.min_available_nodes))
        self._cloud_of: dict[int, int] = {}
        self._origin: Vector | None = None
        self._seconds = 0.0

    def begin(self, theta: Vector) -> None:
        far = float(np.abs(theta).max())
        if self.box is not None and far > self.box:
            raise ValueError(
                f"box must hold the initial model, whose largest entry is {far:g}, got {self.box:g}"
            )
        if self._origin is None:
            self._origin = np.asarray(theta, np.float64)

    def check_clients(self, clients: int) -> None:
        if clients % self.servers:
            raise ValueError(
                f"servers must divide the number of clients, {clients}, got {self.servers}"
            )
        self._check_step(clients)

    def _check_step(self, clients: int) -> None:
        devices = clients // self.servers if self.step_per_cloud else clients
        bound = max(values(self.eta_z)) * max(self.gammas) * devices
        if self.reduce == "sum" and bound > 1.0:
            raise ValueError(
                f'eta_z * gamma * |Q| must be <= 1 with reduce="sum", got {bound:g}'
                f' for |Q| = {devices} devices; reduce="mean" has no such bound'
            )

    def gamma_of(self, client: int) -> float:
        """Return the client's gamma; raise ``ValueError`` if the sequence given ends before it."""
        if len(self.gammas) > 1 and client >= len(self.gammas):
            raise ValueError(f"gamma must have a value for client {client}, got {len(self.gammas)}")
        return self.gammas[client if len(self.gammas) > 1 else 0]

    def client_knobs(self) -> Knobs:
        return {"extrapolation": self.zeta, "box": self.box or 0.0}

    def request(self, server_round: int, client: int) -> dict[str, Scalar]:
        return {**super().request(server_round, client), "gamma": self.gamma_of(client)}

    # ---- devices ------------------------------------------------------------------------------

    def joined(self, client: int, cloud: int) -> None:
        """Take note that ``client`` became a device of ``cloud``."""

    def place(self) -> None:
        """Give every client without a cloud server one."""
        new = sorted(self.nodes.known - self._cloud_of.keys())
        if not self._cloud_of:
            self.check_clients(len(new))
            size = len(new) // self.servers
            for p, client in enumerate(new):
                self._cloud_of[client] = p % self.servers if self._modulo else p // size
        for client in new:
            if client not in self._cloud_of:
                sizes = [list(self._cloud_of.values()).count(n) for n in range(self.servers)]
                self._cloud_of[client] = sizes.index(min(sizes))
                try:
                    self._check_step(len(self._cloud_of))
                except ValueError as error:  # no reason to end a run for the others
                    log(WARNING, "with client %d: %s", client, error)
            self.joined(client, self._cloud_of[client])

    @property
    def _modulo(self) -> bool:
        return self.assignment == "modulo"

    def devices(self, cloud: int, clients: Iterable[int]) -> list[int]:
        """Return those of ``clients`` that belong to ``cloud``, sorted."""
        return sorted(client for client in clients if self._cloud_of[client] == cloud)

    def active(self, server_round: int, cloud: int, clients: Iterable[int]) -> list[int]:
        """Return the active devices of ``cloud`` among ``clients``: the first to call."""
        devices = self.devices(cloud, clients)
        return self.first_to_call(server_round, devices, self.active_size(len(devices)))

    def active_size(self, devices: int) -> int:
        """Return how many of a cloud server's devices are active."""
        least = math.ceil(self.min_train_nodes / self.servers)
        return min(devices, max(int(self.fraction_train * devices + 1e-9), least))

    def first_to_call(self, server_round: int, clients: Collection[int], size: int) -> list[int]:
        """Return the ``size`` clients whose requests arrive first by the virtual clock, sorted."""
        arrival = {c: self.clock.arrival(self.seed, server_round, c) for c in clients}
        return sorted(sorted(clients, key=lambda client: arrival[client])[:size])

    def _sample(
        self, purpose: str, server_round: int, nodes: dict[int, int], fraction: float, least: int
    ) -> list[int]:
        if purpose != "sample":
            return super()._sample(purpose, server_round, nodes, fraction, least)
        self.place()
        clouds = range(self.servers)
        return sorted(c for n in clouds for c in self.active(server_round, n, nodes))

    # ---- rounds -------------------------------------------------------------------------------

    def weight(self, upload: Upload) -> float:
        return self.gamma_of(upload.client)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As the base's; ``virtual-seconds`` tells when the round ends by the virtual clock."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None:
            self._seconds = self.end(self._rounds_before + server_round)
            metrics["virtual-seconds"] = self._seconds
        return arrays, metrics

    def end(self, server_round: int) -> float:
        """Return when the round ends, in virtual seconds from the start of the run."""
        work = {client: row["work"] for client, row in self._clients.items()}
        return self._seconds + self.duration(server_round, self.asked, work)

    def duration(
        self, server_round: int, clients: Iterable[int], work: Mapping[int, float]
    ) -> float:
        """Return the virtual seconds that the slowest of ``clients`` takes.

        ``work`` is the K of the usable replies; one without counts with K = 1.
        """
        times = [
            self.clock.latency(self.seed, server_round, client, work.get(client, 1.0))
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
