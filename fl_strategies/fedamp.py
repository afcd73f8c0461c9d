"""FedAMP: each client has its own model, pulled towards a mean in which similar clients weigh most.

There is no global model to be found. The server keeps the last model w_j of every client, and makes
for each client i of S its own *cloud model* of them, in which models near w_i have the larger
weights. Round, for each client i of S:

    xi_ij = alpha A'(||w_i - w_j||^2) for j != i,  A'(x) = exp(-x / sigma) / sigma   (1)
    u_i   = w_i + sum_{j != i} xi_ij (w_j - w_i)                                (2)
    w_i   ~ argmin_w f_i(w) + (lam / (2 alpha)) ||w - u_i||^2, started at u_i   (3)
    theta <- mean of the last w_j of all clients                                (4)

w_j     model [d] of client j, of the last round in which its reply was used
u_i     cloud model of client i
A       attention, 1 - exp(-x / sigma): the farther a model is, the less it counts
alpha   step of (2), > 0
sigma   scale of squared distances, > 0
lam     weight of the pull, > 0
theta   what travels to everybody: the start of newcomers, who have u_i = theta, and the model that
        the server tests

A client is sent theta and u_i - theta, twice FedAvg's download. It keeps w_i, its personalized
model. The server keeps m models, and computes each cloud model in m d multiplications: it is a rule
for some hundred clients. More than ``memory`` MB of them are refused in the first round.

Facts. Where (3) is exact, a fixed point has grad f_i(w_i) + lam sum_j A'(||w_i - w_j||^2)
(w_i - w_j) = 0: it is stationary for sum_i f_i(w_i) + (lam / 2) sum_{i < j} A(||w_i - w_j||^2),
whatever alpha is. With a large sigma all weights are alike.

Deviations. The paper wants an alpha so small that w_i has a weight of at least 0 in (2); here,
where the weights of the others sum to more than 1, they are divided by their sum. In the paper all
clients take part; here absent ones stay with their last models. (4) is not in the paper. Its
HeurFedAMP, with weights by cosines, is not here.

Reference: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on
Non-IID Data", AAAI 2021, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

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
    """What a client keeps: its personalized model w [d]."""

    w: Vector


def first_state(theta: Vector) -> State:
    """Return the state of a client that has never taken part: w = theta."""
    return State(theta)


def client_rule(
    state: State,
    theta: Vector,
    oracle: Oracle,
    *,
    for_client: Vector | float,
    lam: float,
    alpha: float,
) -> Step:
    """Return the client's next state and its upload, w, by (3); ``for_client`` is u - theta."""
    u = theta + for_client
    solved = oracle.solve(u, Subproblem(pull=lam / alpha, centre=u))
    return Step(solved.w, State(solved.w), solved=solved)


def server_rule(client: int, models: Mapping[int, Vector], *, alpha: float, sigma: float) -> Vector:
    """Return the cloud model u of a client, by (1) and (2), of all clients' ``models``."""
    w = np.asarray(models[client], np.float64)
    u, total = np.zeros_like(w), 0.0
    for other, model in models.items():
        if other != client:
            difference = model - w
            xi = alpha / sigma * math.exp(-float(difference @ difference) / sigma)
            u, total = u + xi * difference, total + xi
    return w + u / max(total, 1.0)


class ServerState(NamedTuple):
    """What the server keeps: the last model w_j [d] of each client."""

    models: Mapping[int, Vector]


class FedAMP(FederatedStrategy):
    """FedAMP's server half; see the module's docstring for the rule and every symbol."""

    algorithm = "fedamp"
    client_half = ClientHalf(client_rule, State, first_state, own="w")
    card = Card(
        "FedAMP",
        "pulls personalized models towards similar ones",
        when="few clients form groups that nobody knows",
        keeps="personalized model",
        paper="Huang et al., AAAI 2021",
        arxiv="2007.03797",
    )
    lam: Schedule = number(
        default=0.1, about="Weight of the pull.", above=0.0, scheduled=True, sent="lam"
    )
    alpha: Schedule = number(
        default=1.0,
        about="Step towards similar models.",
        low=1e-9,
        high=1e9,
        scheduled=True,
        sent="alpha",
    )
    sigma: Schedule = number(
        default=10.0, about="Scale of squared distances.", low=1e-9, high=1e9, scheduled=True
    )
    memory: float = number(
        default=4000.0, about="MB of models that the server keeps at most.", above=0.0
    )

    @property
    def model_from_state(self) -> bool:
        return True

    def first_state(self, theta: Vector) -> ServerState:
        return ServerState({})

    def for_client(self, state: ServerState, round: Round, client: int) -> Vector | None:
        self._check_memory(round)
        if client not in state.models:
            return None
        return self._cloud_model(state, round, client) - round.received

    def reference(self, state: ServerState, round: Round, upload: Upload) -> Vector | float:
        known = upload.client in state.models
        return self._cloud_model(state, round, upload.client) if known else round.received

    def aggregate(self, state: ServerState, round: Round, uploads: Sequence[Upload]) -> Next:
        assert round.layout is not None
        dtype = round.layout.dtype
        fresh = {upload.client: upload.vector.astype(dtype, copy=False) for upload in uploads}
        models = {**state.models, **fresh}
        theta = weighted_mean((models[client], 1.0) for client in sorted(models))
        return theta, ServerState(models), {}

    def _cloud_model(self, state: ServerState, round: Round, client: int) -> Vector:
        alpha, sigma = at(self.alpha, round.number), at(self.sigma, round.number)
        return server_rule(client, state.models, alpha=alpha, sigma=sigma)

    def _check_memory(self, round: Round) -> None:
        """Raise ``ValueError`` if the models of all clients take more than ``memory``."""
        assert round.layout is not None
        megabytes = round.population * len(round.theta) * round.layout.dtype.itemsize / 1e6
        if megabytes > self.memory:
            raise ValueError(
                f"the models of {round.population} clients take {megabytes:,.0f} MB, and the server"
                f" keeps at most memory={self.memory:,.0f} MB of them"
            )
