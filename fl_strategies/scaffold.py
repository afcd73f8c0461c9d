"""SCAFFOLD: control variates remove from each local step what is particular to its client.

Each client keeps in c_i the mean direction of its own gradients; the server keeps in c the mean
direction of all clients' gradients. The difference corrects each local step, so that it follows the
mean of all clients. Round with theta and c received, for each client i of S:

    w       = theta after K steps  w <- w - lr (g_i(w; b) - c_i + c)            (1)
    c_i+    = c_i - c + (theta - w)/A_i                           option II     (2)
    c_i+    = grad f_i(theta)                                     option I      (3)
    theta <- theta + (eta_g/|S|) sum_{i in S} (w_i - theta)                     (4)
    c     <- c + (1/m) sum_{i in S} (c_i+ - c_i)                                (5)

c_i, c  control variates [d] over the trainable parameters, c_i kept by the client, c by the server;
        all start at 0. They travel with the model: c in the request, c_i+ - c_i in the reply
A_i     K lr with the K steps that client i really took, and with momentum, a schedule, or groups
        of other rates what their gradients count by (``fl_strategies.solvers.gradient_weights``):
        by (1) and (2), c_i+ is a mean of their g_i(w; b)
eta_g   server step, > 0
m       clients ever connected, departed ones included, or ``num_clients`` if that is more

Facts. The server keeps S_c = sum_i c_i, and c = S_c/m: c is the mean of the c_i at all times, also
when clients join later (their c_i is 0), and when replies are lost, because a client whose reply
was not used takes its c_i+ back. A first round is FedAvg's with uniform weights. Full batches,
K = 1 and all clients in S give gradient descent. If a client leaves, or loses its state and begins
anew with c_i = 0, its last c_i stays in S_c forever: the model stops where sum_j f_j(w) +
<c_i, w> is least. If the client left, the sum is over the others, and the model stops at the
optimum if the client left there. If the client lost its state at the optimum, f_i counts twice from
then on: four clients of quadratics with eigenvalues in [0.4, 2.5], which start 3.8 off, stop 1.1
off. So ``lost_state`` is "warn" by default; "refuse" treats such a client as one that left.

(2) holds for gradient steps, with momentum or without: an adaptive solver, extrapolation or a box
would give a c_i+ that is not a mean of gradients, and are refused with option II. Weight decay is
a term of f_i. Option I costs one more gradient on all samples, and works with any solver. The paper
has plain steps of one rate, for which A_i = K lr.

Reference: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning", ICML 2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Schedule, choice, number
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.schedules import at
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector, weighted_sum
from fl_strategies.server.algorithm import NUM_CLIENTS, Card, Next
from fl_strategies.server.strategy import FederatedStrategy
from fl_strategies.solvers.gradient_weights import check_weights_known

Option: TypeAlias = Literal["I", "II"]

CONTROL = "control"
"""The name under which c and c_i+ - c_i travel."""


class State(NamedTuple):
    """What a client keeps: its control variate c_i [d]."""

    c: Vector


def first_state(theta: Vector) -> State:
    """Return the state of a client that has never taken part: c_i = 0."""
    return State(c=0.0 * theta)


def check_option(option: Option, settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if (2) is asked for under local settings that it does not hold for."""
    if option == "II":
        why = 'SCAFFOLD with option="II" needs gradient steps; use option="I"'
        check_weights_known(settings, why)


def client_rule(
    state: State,
    theta: Vector,
    oracle: Oracle,
    *,
    control: Vector,
    option: Option = "II",
) -> Step:
    """Return the client's next state, and its uploads w - theta and c_i+ - c_i.

    By (1), and by (2) or (3); ``control`` is c.
    """
    solved = oracle.solve(theta, Subproblem(slope=control - state.c), rates=option == "II")
    moved = solved.w - theta
    if option == "I":
        c_new = oracle.full_gradient(theta)
    else:
        c_new = state.c - control + (theta - solved.w) / solved.rates
    return Step(moved, State(c_new), solved=solved, extra_vectors={CONTROL: c_new - state.c})


def server_rule(
    theta: Vector, total: Vector, uploads: Iterable[tuple[Vector, Vector]], *, rate: float
) -> tuple[Vector, Vector]:
    """Return the next model by (4) and the next S_c by (5), from (w_i - theta, c_i+ - c_i)."""
    deltas, changes = zip(*uploads, strict=True)
    moved, count = weighted_sum((delta, 1.0) for delta in deltas)
    next_total, _ = weighted_sum((change, 1.0) for change in (total, *changes))
    return theta + rate * (moved / count), next_total


class ServerState(NamedTuple):
    """What the server keeps: S_c [d], the sum of all changes of control variates; c = S_c/m."""

    total: Vector


class SCAFFOLD(FederatedStrategy):
    """SCAFFOLD's server half; see the module's docstring for the rule and every symbol.

    Raises ``ValueError`` for local settings that do not go with option II.
    """

    algorithm = "scaffold"
    client_half = ClientHalf(client_rule, State, first_state)
    card = Card(
        "SCAFFOLD",
        "corrects each local step by control variates",
        when="data are non-IID, clients keep state, and twice the bytes are affordable",
        keeps="control variate",
        paper="Karimireddy et al., ICML 2020",
        arxiv="1910.06378",
    )
    averages = "changes"
    extra_vectors = (CONTROL,)
    accumulates_changes = True
    folds = True

    eta_g: Schedule = number(default=1.0, about="Server step.", above=0.0, scheduled=True)
    option: Option = choice(
        default="II",
        choices=("I", "II"),
        about="Which c_i+ clients take, (3) or (2).",
        sent="option",
    )
    num_clients: int = NUM_CLIENTS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option(self.option, self.local)

    def first_state(self, theta: Vector) -> ServerState:
        return ServerState(np.zeros_like(theta))

    def vectors(self, state: ServerState, round: Round) -> Mapping[str, Vector]:
        return {CONTROL: state.total / round.population}

    def aggregate(self, state: ServerState, round: Round, uploads: Sequence[Upload]) -> Next:
        pairs = ((upload.vector, upload.extra_vectors[CONTROL]) for upload in uploads)
        rate = at(self.eta_g, round.number)
        theta, total = server_rule(round.theta, state.total, pairs, rate=rate)
        return theta, ServerState(total), {}
