"""FedADMM: dual variables and a tracking update, with partial participation.

Each client keeps a dual variable y, which records how it disagrees with the others and bends its
local problem until the local minimiser is the global one. The server tracks the mean of all
clients, absent ones included. Round with the received model theta, for each client i of S:

    w+    ~ argmin_w  f_i(w) + <y, w - theta> + (rho/2) ||w - theta||^2         (1)
    y+    = y + rho (w+ - theta)                                                (2)
    Delta = (w+ + y+/rho) - (w + y/rho)                                         (3)
    theta <- theta + (eta/|S|) sum_{i in S} Delta_i                             (4)

w, y    client's model and dual variable [d], both kept by the client; at its first participation
        w = theta received and y = 0
rho     penalty, > 0; a schedule {first round: rho} is allowed: (3) then takes y/rho with the rho of
        the client's last participation, so that the sums of (4) still telescope
eta     server step, in (0, 2]: a number, a schedule, or "fraction" = |S|/m for m clients, the
        setting of Theorem 1. All clients then count from w = theta^0, the model the run began with:
        the server adds theta - theta^0 to a newcomer's Delta (``newcomer="origin"``), keeps D, the
        sum of all Deltas, and computes

    theta <- theta^0 + D/m                                                      (5)

m       clients ever connected, departed ones included, or ``num_clients`` if that is more; by (5)
        D counts anew when m grows, where steps by (4) would keep what they took with a smaller m

Facts. By (5), theta = (1/m) sum_i (w_i + y_i/rho) after every round that is not skipped, whoever
takes part, joins late or loses a reply; a client that never took part counts with w = theta^0, y =
0. So a Delta counts whole, however late it comes: ``pace=Buffered()`` is asynchronous FedADMM. By
(4) with w = theta for newcomers (``newcomer="received"``, the default with a number for eta), the
same holds after a round of all m clients with eta = 1, and with eta = |S|/m from then on.

- With all clients in all rounds theta converges to the optimum, with eta = 1 as well. With some of
  them it does so with eta = "fraction". With a number for eta it stops near the optimum or
  diverges: two of four clients a round, on quadratics with eigenvalues in [0.4, 2.5] and from 3.8
  off the optimum, stop 0.6 to 1.3 off it with eta = 1 and rho = 1, which depends on the sampled
  clients, and diverge with rho = 2.
- A client that left permanently still counts, as (rho/2) ||theta - u||^2 added to the others' f_j,
  with its last u = w + y/rho: if the client left at the optimum, the optimum stays. If the client
  never took part, u = theta^0; so also for each of the ``num_clients`` that does not exist.
- A client that lost its state begins anew, while its u stays in D. From then on theta stops where
  sum_j f_j(theta) - rho <u - theta', theta> is least, with theta' the model at its return: 1.1 off
  the optimum on the problem above (four clients, state lost at the optimum). So ``lost_state`` is
  "warn" by default; with "refuse" the client counts as one that left.

With y frozen at 0 and Delta = w+ - theta this is FedProx; with rho = 0 as well, FedAvg. With eta =
"fraction" it is the FedADMM of Wang, Marella and Anderson (CDC 2022), also with a regularizer, and
the FedDR of Tran-Dinh et al. (NeurIPS 2021) with alpha = 1, whose first step all clients take.

Deviation from the paper, whose appendix begins with w = theta^0 and y = 0 at every client: a
newcomer has w = theta received. ``newcomer="origin"`` corrects its Delta alone, and local training
starts at theta received, because theta^0 does not travel again. With a number for eta the paper's w
would add theta - theta^0 once for each newcomer.

Deviations of the authors' published code, each an option: local training starts from theta
(``local_start="global"``); Delta is taken against theta, so that it is 2 (w+ - theta)
(``tracking="global"``); eta falls from 1 to 0.5 at round 60: ``FedADMM.authors_rule``. The paper
and the code have rho = 0.01, which is small for few clients and samples: the default is 0.1.

Reference: Gong, Li, Freris, "FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to
System Heterogeneity", ICDE 2022, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Scalar, Schedule, choice, number
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.schedules import at
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector, weighted_mean, weighted_sum
from fl_strategies.server.algorithm import NUM_CLIENTS, Card, Next
from fl_strategies.server.strategy import FederatedStrategy

Side: TypeAlias = Literal["client", "global"]
Newcomer: TypeAlias = Literal["received", "origin"]


class State(NamedTuple):
    """What a client keeps: model w, dual variable y, and the rho of its last participation."""

    w: Vector
    y: Vector
    rho: float


def first_state(theta: Vector, *, rho: float) -> State:
    """Return the state of a client that has never taken part: w = theta, y = 0."""
    return State(w=theta, y=0.0 * theta, rho=rho)


def client_rule(
    state: State,
    theta: Vector,
    oracle: Oracle,
    *,
    rho: float,
    local_start: Side = "client",
    tracking: Side = "client",
) -> Step:
    """Return the client's next state and its upload Delta, by (1)-(3)."""
    w, y, rho_before = state
    start = w if local_start == "client" else theta
    solved = oracle.solve(start, Subproblem(slope=y, pull=rho, centre=theta))
    w_new = solved.w
    y_new = y + rho * (w_new - theta)
    before = w + y / rho_before if tracking == "client" else theta + y / rho
    delta = (w_new + y_new / rho) - before
    return Step(delta, State(w_new, y_new, rho), solved=solved)


def server_rule(theta: Vector, deltas: Iterable[Vector], *, step: float) -> Vector:
    """Return theta + step * (mean of the Deltas), by (4) with step = eta."""
    return theta + step * weighted_mean((delta, 1.0) for delta in deltas)


def sum_rule(
    origin: Vector, total: Vector, deltas: Iterable[Vector], *, clients: int
) -> tuple[Vector, Vector]:
    """Return the next model by (5), from theta^0 and D = ``total`` of before, and the next D."""
    next_total, _ = weighted_sum([(total, 1.0), *((delta, 1.0) for delta in deltas)])
    return origin + next_total / clients, next_total


class ServerState(NamedTuple):
    """What the server keeps for (5): theta^0 [d], and D [d], the sum of all recorded changes."""

    origin: Vector
    total: Vector


class FedADMM(FederatedStrategy):
    """FedADMM's server half; see the module's docstring for the rule and every symbol.

    theta^0 and D outlast a ``start``. If a later ``start`` gets another model than the last one's,
    clients receive that model in the first round, and (5) continues from theta^0.
    """

    algorithm = "fedadmm"
    client_half = ClientHalf(client_rule, State, first_state, own="w")
    card = Card(
        "FedADMM",
        "dual variables and a tracking update, with partial participation",
        when="data are non-IID, few clients train in a round, and clients keep state",
        keeps="model, dual",
        paper="Gong, Li, Freris, ICDE 2022",
        arxiv="2204.03529",
    )
    averages = "changes"
    accumulates_changes = True
    folds = True
    paper_rule: ClassVar[Mapping[str, Any]] = {
        "rho": 0.01,
        "eta": 1.0,
        "local_start": "client",
        "tracking": "client",
    }
    paper_local: ClassVar[Mapping[str, Scalar]] = {"epochs": 5, "random-epochs": True}
    authors_rule: ClassVar[Mapping[str, Any]] = {
        "rho": 0.01,
        "eta": {1: 1.0, 60: 0.5},
        "local_start": "global",
        "tracking": "global",
    }
    authors_local: ClassVar[Mapping[str, Scalar]] = {**paper_local, "momentum": 0.5}

    rho: Schedule = number(
        default=0.1,
        about="Penalty; the paper's is 0.01.",
        above=0.0,
        scheduled=True,
        sent="rho",
    )
    eta: Schedule | Literal["fraction"] = number(
        default=1.0,
        about='Server step; "fraction" is |S|/m, with |S| the replies used.',
        above=0.0,
        high=2.0,
        scheduled=True,
        words=("fraction",),
    )
    local_start: Side = choice(
        default="client",
        choices=("client", "global"),
        about="Whether (1) starts from the client's own w or from theta.",
        sent="local-start",
    )
    tracking: Side = choice(
        default="client",
        choices=("client", "global"),
        about="What a client subtracts from its new model to get Delta: its own w, or theta.",
        sent="tracking",
    )
    newcomer: Newcomer | None = choice(
        default=None,
        choices=("received", "origin"),
        about="From where a new client's first Delta counts: the received theta, or theta^0."
        ' The default is "origin" with eta="fraction" and tracking="client", else "received".'
        ' "origin" needs tracking="client".',
    )
    num_clients: int = NUM_CLIENTS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.newcomer == "origin" and self.tracking == "global":
            raise ValueError(
                'newcomer must be "received" with tracking="global", which takes every Delta'
                ' against the theta received, got "origin"'
            )
        from_origin = self.eta == "fraction" and self.tracking == "client"
        self.newcomer = self.newcomer or ("origin" if from_origin else "received")

    @property
    def model_from_state(self) -> bool:
        return self.eta == "fraction"

    @property
    def takes_late_changes(self) -> bool:
        return self.eta == "fraction" and self.tracking == "client"

    def proximal_rate(self, server_round: int) -> float | None:
        by_sum = self.takes_late_changes and self.newcomer != "received"
        return 1.0 / at(self.rho, server_round) if by_sum else None

    def begin(self, state: ServerState | None, round: Round, num_rounds: int) -> ServerState | None:
        if self.newcomer == "origin" and not round.acked:
            return ServerState(round.theta, np.zeros_like(round.theta))
        return state

    def aggregate(self, state: ServerState | None, round: Round, uploads: Sequence[Upload]) -> Next:
        theta, m = round.theta, round.population
        origin = None if state is None else state.origin
        deltas = (changed(upload, round, origin) for upload in uploads)
        if state is None or self.eta != "fraction":
            step = len(uploads) / m if self.eta == "fraction" else at(self.eta, round.number)
            return server_rule(theta, deltas, step=step), state, {}
        theta, total = sum_rule(state.origin, state.total, deltas, clients=m)
        return theta, ServerState(state.origin, total), {}


def changed(upload: Upload, round: Round, origin: Vector | None) -> Vector:
    """Return Delta as the change of a client that began at theta^0 = ``origin``, if that is given.

    A client that lost its state is known, and D holds its changes already.
    """
    if not upload.newcomer or origin is None:
        return upload.vector
    return upload.vector + (round.received_by(upload) - origin)
