"""FedDyn: a dual variable per client bends its local problem, and the server subtracts their mean.

Each client's dual variable records how it disagrees with the others and bends its local objective.
So a model on which all clients agree is a stationary point of the mean loss. Round with theta, for
each client i of S:

    w_i   ~ argmin_w  f_i(w) + <y_i, w - theta> + (alpha/2) ||w - theta||^2     (1)
    y_i+  = y_i + alpha (w_i - theta)                                           (2)
    h     <- h - (1/m) sum_{i in S} alpha (w_i - theta)                         (3)
    theta <- (1/|S|) sum_{i in S} w_i - h/alpha                                 (4)

y_i     dual variable [d] of client i, at first 0, kept by the client; the paper's gradient term of
        the client is -y_i
h       kept by the server, at first 0
alpha   penalty, > 0; with a schedule, (4) uses the value of the round
m       clients ever connected, departed ones included, or ``num_clients`` if that is more

Facts. h = -(1/m) sum_i y_i after every round that is not skipped, whoever takes part, joins late or
loses a reply: the server keeps Y = sum_i y_i, and h = -Y/m, so that a growing m rescales it. With
all clients in every round this is FedADMM with rho = alpha, eta = 1 and ``local_start="global"``.
A client that lost its state begins anew with y_i = 0 while its last y_i stays in Y forever, so
``lost_state`` is "warn" by default.

Clients upload w_i - theta, which server and client both add to their states.

Reference: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on
Dynamic Regularization", ICLR 2021, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Schedule, number
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.schedules import at
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector, weighted_sum
from fl_strategies.server.algorithm import NUM_CLIENTS, Card, Next
from fl_strategies.server.strategy import FederatedStrategy


class State(NamedTuple):
    """What a client keeps: its dual variable y [d]."""

    y: Vector


def first_state(theta: Vector) -> State:
    """Return the state of a client that has never taken part: y = 0."""
    return State(y=0.0 * theta)


def client_rule(state: State, theta: Vector, oracle: Oracle, *, alpha: float) -> Step:
    """Return the client's next state and its upload w - theta, by (1) and (2)."""
    solved = oracle.solve(theta, Subproblem(slope=state.y, pull=alpha, centre=theta))
    moved = solved.w - theta
    return Step(moved, State(state.y + alpha * moved), solved=solved)


def server_rule(
    theta: Vector, duals: Vector, moves: Sequence[Vector], *, alpha: float, clients: int
) -> tuple[Vector, Vector]:
    """Return the next model by (4) and the next Y by (3), from the moves w_i - theta."""
    moved, count = weighted_sum((move, 1.0) for move in moves)
    duals = duals + alpha * moved
    return theta + moved / count + duals / (clients * alpha), duals


class ServerState(NamedTuple):
    """What the server keeps: Y [d], the sum of all clients' dual variables."""

    duals: Vector


class FedDyn(FederatedStrategy):
    """FedDyn's server half; see the module's docstring for the rule and every symbol."""

    algorithm = "feddyn"
    client_half = ClientHalf(client_rule, State, first_state)
    card = Card(
        "FedDyn",
        "dual variables bend local objectives; the server subtracts their mean",
        when="data are non-IID and each client can keep one vector",
        keeps="dual",
        paper="Acar et al., ICLR 2021",
        arxiv="2111.04263",
    )
    averages = "changes"
    accumulates_changes = True
    folds = True

    alpha: Schedule = number(
        default=0.01,
        about="Penalty; the paper tunes 0.001 ... 0.1.",
        above=0.0,
        scheduled=True,
        sent="alpha",
    )
    num_clients: int = NUM_CLIENTS

    def proximal_rate(self, server_round: int) -> float:
        return 1.0 / at(self.alpha, server_round)

    def first_state(self, theta: Vector) -> ServerState:
        return ServerState(np.zeros_like(theta))

    def aggregate(self, state: ServerState, round: Round, uploads: Sequence[Upload]) -> Next:
        theta, duals = server_rule(
            round.theta,
            state.duals,
            [upload.vector for upload in uploads],
            alpha=at(self.alpha, round.number),
            clients=round.population,
        )
        return theta, ServerState(duals), {}
