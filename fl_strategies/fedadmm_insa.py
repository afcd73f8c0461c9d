"""FedADMM-InSa: each client balances its own penalty, and stops local work by a test.

FedADMM needs one penalty rho for all clients, and a number of local epochs. Here each client sets
its own rho_i by comparing two residuals, and ends its epochs once its local problem is solved well
enough. With unequal rho_i the mean of w_i + y_i/rho_i is no longer right: the server weights by
rho_i. Round with the received model theta, for each client i of S:

    w+    ~ argmin_w  f_i(w) + <y, w - theta> + (rho_i/2) ||w - theta||^2       (1)
    e(w)  = grad f_i(w) + y + rho_i (w - theta):  (1) ends after the first epoch at whose end
            ||e(w)|| <= sigma_i ||e(start)||,  sigma_i = 0.999 sqrt2 / (sqrt2 + sqrt(rho_i/c))  (2)
    y+    = y + rho_i (w+ - theta)                                              (3)
    rho_i+ = tau rho_i  if ||w+ - theta|| > mu rho_i ||w+ - w||,
             rho_i/tau  if rho_i ||w+ - w|| > mu ||w+ - theta||,  else rho_i    (4)
    theta <- sum_j (rho_j w_j + y_j) / sum_j rho_j  over all m clients          (5)

w, y    client's model and dual variable [d], both kept by the client; a client that never took part
        counts in (5) with w = theta^0, y = 0 and rho
rho     the first rho_i, > 0; (5) has the rho_i of the client's last participation, (4) is for its
        next one; rho_i stays within a factor of 1,000 of rho
c       convexity of the f_i, as the theory of (2) wants it: a larger c ends local work sooner. With
        c = 0 clients take all their epochs, and no gradient on all samples is computed
mu, tau (4) acts where one residual is mu times the other, by the factor tau; tau = 1 fixes rho
m       clients ever connected, departed ones included, or ``num_clients`` if that is more

The ``epochs`` or ``steps`` of ``local`` bound (1), so take several. A client uploads the change of
its part of (5), counted from theta, and rho_i:

    Delta = rho_i (w+ - theta) + y+ - (rho_i' (w - theta) + y)                  (6)
    D     <- D + sum_{i in S} (Delta_i + (rho_i - rho_i') (theta - theta^0))
    theta <- theta^0 + D / sum_j rho_j                                          (7)

rho_i'  penalty of the client's last participation; before that rho in (6), and 0 in D

Facts. By (7), (5) holds after every round that is not skipped, whoever takes part, joins late or
loses a reply, and however late a reply comes: ``pace=Buffered()`` is the asynchronous form. The
optimum of the mean loss is a fixed point for any rho_i, where y_i = -grad f_i. With tau = 1 and c =
0 this is FedADMM with eta = "fraction". A client that lost its state begins anew, while its last
part stays in D, so ``lost_state`` is "warn" by default.

Deviations from the authors' published code, which counts clients by their samples (here equally,
as in FedADMM), starts at theta and takes e(theta) in (2) (``local_start="global"``), has absent
clients count with their next rho_i, no bound of rho_i, and ends each round with theta <- (theta+ +
0.01 theta)/1.01. Its values are rho = 10, c = 0.01, mu = 5, tau = 2, and ten epochs at most.

Reference: Song, Wang, Zuazua, "FedADMM-InSa: An Inexact and Self-Adaptive ADMM for Federated
Learning", Neural Networks 2025; (2) and (4) as in the authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import choice, number
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.stacks import norm
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector, weighted_sum
from fl_strategies.server.algorithm import NUM_CLIENTS, Card, Next
from fl_strategies.server.strategy import FederatedStrategy

Start: TypeAlias = Literal["client", "global"]

PENALTY = "penalty"
FARTHEST = 1000.0
"""The factor by which a client's rho_i may differ from rho."""


class State(NamedTuple):
    """What a client keeps: w, y, and rho_i of its last participation and of its next one."""

    w: Vector
    y: Vector
    rho: float
    next_rho: float


def first_state(theta: Vector, *, rho: float) -> State:
    """Return the state of a client that has never taken part: w = theta, y = 0."""
    return State(w=theta, y=0.0 * theta, rho=rho, next_rho=rho)


def client_rule(
    state: State,
    theta: Vector,
    oracle: Oracle,
    *,
    rho: float,
    convexity: float,
    mu: float,
    tau: float,
    local_start: Start = "client",
) -> Step:
    """Return the client's next state and its upload Delta, by (1)-(4) and (6)."""
    w, y, last_rho, rho_i = state
    start = w if local_start == "client" else theta
    until = inexactness(rho_i, convexity=convexity) if convexity else None
    solved = oracle.solve(start, Subproblem(slope=y, pull=rho_i, centre=theta), until=until)
    w_new = solved.w
    y_new = y + rho_i * (w_new - theta)
    delta = (rho_i * (w_new - theta) + y_new) - (last_rho * (w - theta) + y)
    far, moved = float(norm(w_new - theta)), float(norm(w_new - w))
    balanced = balance(rho_i, far, rho_i * moved, mu=mu, tau=tau)
    next_rho = min(max(balanced, rho / FARTHEST), rho * FARTHEST)
    return Step(delta, State(w_new, y_new, rho_i, next_rho), {PENALTY: rho_i}, solved)


def inexactness(rho: float, *, convexity: float) -> float:
    """Return sigma of (2)."""
    return 0.999 * math.sqrt(2.0) / (math.sqrt(2.0) + math.sqrt(rho / convexity))


def balance(rho: float, primal: float, dual: float, *, mu: float, tau: float) -> float:
    """Return the next rho_i, by (4) with ``primal`` = ||w+ - theta||, ``dual`` = rho ||w+ - w||."""
    if primal > mu * dual:
        return rho * tau
    return rho / tau if dual > mu * primal else rho


def server_rule(
    origin: Vector, total: Vector, changes: Iterable[tuple[Vector, float]], *, penalties: float
) -> tuple[Vector, Vector]:
    """Return the next model and D by (7), from theta^0, the D before, and vectors with factors.

    ``penalties`` is the sum of all rho_j.
    """
    total, _ = weighted_sum([(total, 1.0), *changes])
    return origin + total / penalties, total


class ServerState(NamedTuple):
    """What the server keeps: theta^0 and D [d], and rho_i of each client that took part."""

    origin: Vector
    total: Vector
    penalties: Mapping[int, float]


class FedADMMInSa(FederatedStrategy):
    """FedADMM-InSa's server half; see the module's docstring for the rule and every symbol.

    theta^0 and D outlast a ``start``, as FedADMM's do.
    """

    algorithm = "fedadmm-insa"
    client_half = ClientHalf(client_rule, State, first_state, own="w", stacks=False)
    card = Card(
        "FedADMM-InSa",
        "FedADMM whose clients set their own penalties, and stop local work by a test",
        when="as for FedADMM, and its penalty cannot be tuned",
        keeps="model, dual, penalty",
        paper="Song, Wang, Zuazua, Neural Networks 2025",
        arxiv="2402.13989",
    )
    accumulates_changes = True
    folds = True

    rho: float = number(
        default=0.1, about="The first penalty of each client.", above=0.0, sent="rho"
    )
    convexity: float = number(
        default=0.01,
        about="c of (2); 0: clients take all their epochs.",
        low=0.0,
        sent="convexity",
    )
    mu: float = number(
        default=5.0, about="How unequal the residuals of (4) may be.", low=1.0, sent="mu"
    )
    tau: float = number(
        default=2.0, about="Factor by which (4) changes a penalty; 1: never.", low=1.0, sent="tau"
    )
    local_start: Start = choice(
        default="client",
        choices=("client", "global"),
        about="Whether (1) starts from the client's own w or from theta.",
        sent="local-start",
    )
    num_clients: int = NUM_CLIENTS

    @property
    def model_from_state(self) -> bool:
        return True

    @property
    def takes_late_changes(self) -> bool:
        return True

    @property
    def scalar_bounds(self) -> Mapping[str, tuple[float, float]]:
        return {PENALTY: (self.rho / FARTHEST, self.rho * FARTHEST)}

    def begin(self, state: ServerState | None, round: Round, num_rounds: int) -> ServerState | None:
        if not round.acked:
            return ServerState(round.theta, np.zeros_like(round.theta), {})
        return state

    def aggregate(self, state: ServerState, round: Round, uploads: Sequence[Upload]) -> Next:
        origin, total, known = state
        penalties = {**known, **{upload.client: upload.scalars[PENALTY] for upload in uploads}}
        changes: list[tuple[Vector, float]] = [(upload.vector, 1.0) for upload in uploads]
        for upload in uploads:
            if more := penalties[upload.client] - known.get(upload.client, 0.0):
                changes.append((round.received_by(upload) - origin, more))
        others = self.rho * (round.population - len(penalties))
        of_all = sum(penalties.values()) + others
        theta, total = server_rule(origin, total, changes, penalties=of_all)
        return theta, ServerState(origin, total, penalties), {}
