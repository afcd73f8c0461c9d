"""A-FedPD: FedDyn whose absent clients' dual variables move along with the others'.

In FedDyn the dual variable of an absent client stands still while the global model moves, and is
far off when the client returns. In A-FedPD absent clients count as if they had trained to the mean
model of the clients that took part. Round with theta, for each client i of S and each j not in S:

    w_i   ~ argmin_w  f_i(w) + <y_i, w - theta> + (rho/2) ||w - theta||^2       (1)
    wbar  = (1/|S|) sum_{i in S} w_i                                            (2)
    y_i   <- y_i + rho (w_i - theta),     y_j <- y_j + rho (wbar - theta)       (3)
    theta <- wbar + (1/rho) mean over all clients of y                          (4)

y_i     dual variable [d] of client i, at first 0
rho     penalty, > 0; with a schedule, (3) and (4) use the value of the round
S       the clients whose replies are used; a client whose reply is lost is absent

The mean V of all y moves by (3) as the dual variable of an absent client does, whoever takes part:

    V     <- V + rho (wbar - theta),      theta <- wbar + V/rho                 (5)

Absent clients: y_j - V stands still while j is away. So a client that was last used in round r
adds V - V_r to the y_j that it kept, with V_r the V after round r; one that was never used has
V_r = 0 and begins with y_j = V. The server keeps V_r for each round that is some client's last, and
sends V - V_r to that client alone, with theta. The client cannot compute V_r: it uploads before
wbar is known. The paper's server keeps all m dual variables and sends each client its own: as many
bytes, and more memory. With 1,000 clients, ten a round, about 300 rounds are some client's last.

Facts. V is the mean of all y, those of absent and of future clients included, after every round
that is not skipped, whoever joins late, leaves or loses a reply: y - V starts at 0, and (3) leaves
its sum as it is. So m is in no formula. With all clients in every round this is FedDyn with alpha =
rho. By (3) the dual variable of a client that is never absent is FedDyn's. A client that was used
in the last round that is not skipped receives theta alone; any other receives d numbers more. A
client that lost its state begins anew with 0 in the place of the y_j that it had kept, while V
stays. The mean of all y is then off V by y_j/m forever, so ``lost_state`` is "warn" by default.

Clients upload w_i - theta, which server and client both add to their states.

Reference: Sun, Shen, Tao, "A-FedPD: Aligning Dual-Drift is All Federated Primal-Dual Learning
Needs", NeurIPS 2024, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Schedule, number
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.schedules import at
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector, weighted_mean
from fl_strategies.server.algorithm import Card, Next
from fl_strategies.server.strategy import FederatedStrategy


class State(NamedTuple):
    """What a client keeps: its dual variable y [d], as of the last round in which it took part."""

    y: Vector


def first_state(theta: Vector) -> State:
    """Return the state of a client that has never taken part: y = 0, to which V is added."""
    return State(y=0.0 * theta)


def client_rule(
    state: State, theta: Vector, oracle: Oracle, *, catch_up: Vector | float, rho: float
) -> Step:
    """Return the client's next state and its upload w - theta, by (1) and (3).

    ``catch_up`` is V - V_r, 0 for a client of the last round.
    """
    y = state.y + catch_up
    solved = oracle.solve(theta, Subproblem(slope=y, pull=rho, centre=theta))
    moved = solved.w - theta
    return Step(moved, State(y + rho * moved), solved=solved)


def server_rule(
    theta: Vector, mean: Vector | float, moves: Iterable[Vector], *, rho: float
) -> tuple[Vector, Vector]:
    """Return the next model and V by (5), from the moves w_i - theta and the last V, ``mean``."""
    moved = weighted_mean((move, 1.0) for move in moves)
    mean = mean + rho * moved
    return theta + moved + mean / rho, mean


class ServerState(NamedTuple):
    """What the server keeps: V [d] after each round that is some client's last, by round."""

    means: Mapping[int, Vector]

    @property
    def mean(self) -> Vector | float:
        """V after the last round that stands, 0 before the first."""
        return self.means[max(self.means)] if self.means else 0.0


class AFedPD(FederatedStrategy):
    """A-FedPD's server half; see the module's docstring for the rule and every symbol."""

    algorithm = "a-fedpd"
    client_half = ClientHalf(client_rule, State, first_state)
    card = Card(
        "A-FedPD",
        "FedDyn whose absent clients' dual variables move along",
        when="data are non-IID, few clients train in a round, and clients keep state",
        keeps="dual",
        paper="Sun, Shen, Tao, NeurIPS 2024",
        arxiv="2409.18915",
    )
    averages = "changes"
    accumulates_changes = True
    folds = True

    rho: Schedule = number(
        default=0.01,
        about="Penalty; with a schedule, each round's.",
        above=0.0,
        scheduled=True,
        sent="rho",
    )

    def proximal_rate(self, server_round: int) -> float:
        return 1.0 / at(self.rho, server_round)

    def first_state(self, theta: Vector) -> ServerState:
        return ServerState({})

    def catch_up(self, state: ServerState, since: int) -> Vector | None:
        if not state.means or since == max(state.means):
            return None
        return state.mean - (state.means[since] if since > 0 else 0.0)

    def aggregate(self, state: ServerState, round: Round, uploads: Sequence[Upload]) -> Next:
        rho = at(self.rho, round.number)
        moves = (upload.vector for upload in uploads)
        theta, mean = server_rule(round.theta, state.mean, moves, rho=rho)
        last = {*{**round.acked, **{upload.client: upload.round for upload in uploads}}.values()}
        assert round.layout is not None
        dtype = round.layout.dtype  # only V continues, in float64
        before = {r: v.astype(dtype, copy=False) for r, v in state.means.items() if r in last}
        return theta, ServerState({**before, round.number: mean}), {}
