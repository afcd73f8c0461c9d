"""ProxSkip (Scaffnew): control variates, and a random number of local steps between rounds.

Each client corrects its gradient steps by a control variate, which approaches its own gradient at
the optimum: then local steps no longer pull clients apart. After each step all communicate with
probability p. So the number of steps between two communication rounds is random, the same for all.
Round with the received model theta, for each client i of S:

    h_i   <- h_i + (p/g) (theta_i - x_i)                                        (1)
    x_i   = theta after K steps of rate g on f_i(w) - <h_i, w>,  K ~ Geometric(p)  (2)
    theta <- (1/|S|) sum_{i in S} x_i                                           (3)

h_i     control variate [d] of client i, at first 0, kept by the client
x_i     model [d] of the client's last participation, kept by it; (1) is for a client that has one
theta_i the global model after that participation, by (3)
p       probability that a step is the last of a round, in (0, 1]: 1/p steps on average. The theory
        wants p = sqrt(g mu) for mu-strongly convex f_i
g       learning rate (the ``lr`` of ``local``) of that participation, the same for all clients
K       drawn by the server for each round; one step takes one mini-batch

Facts. sum_i h_i = 0 whoever takes part, joins late or loses a reply: (1) adds up to 0 over the
clients of a round, once each has received its theta_i, and a lost reply undoes its client's h_i and
x_i. theta_i is the received model if the client was used in the last round that is not skipped;
else it travels, too, as theta_i - theta. At a fixed point h_i = grad f_i(theta), so that the mean
of all grad f_i is 0. The paper has all clients in every round; with some of them, at least two, the
optimum stays a fixed point, and quadratics reach it. With one client a round h_i stays 0.

A client that lost its state begins anew with h_i = 0, and the others' sum is off by its last one
forever, so ``lost_state`` is "warn" by default.

Relations. No client computes a proximal map: that of "all x_i are equal" is the mean (3), which
``p`` skips, as FedPD's does. FedPD's iterations solve a local problem with a pull; these are plain
gradient steps. (1) is FedADMM's dual step with y_i = -h_i, rho = p/g, and the next global model in
the place of the received one. If K were always 1/p, with all clients in every round, this would be
SCAFFOLD with option II, h_i = c_i - c, at half of its bytes. With p = 1 it is: gradient descent on
the mean loss.

Clients upload x_i - theta, which server and client both add to their states.

Reference: Mishchenko, Malinovsky, Stich, Richtarik, "ProxSkip: Yes! Local Gradient Steps Provably
Lead to Communication Acceleration! Finally!", ICML 2022, Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import number
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.randomness import stream
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Number, Vector, weighted_mean
from fl_strategies.server.algorithm import Card, Next
from fl_strategies.server.strategy import FederatedStrategy
from fl_strategies.solvers.local import RATE
from fl_strategies.solvers.own_steps import PLAIN, check_plain_steps

STEPS: Mapping[str, Sequence[Any]] = {**PLAIN, "residual": ()}
"""Local settings with which (2) takes all its steps, each of rate g."""
DRAWN: Mapping[str, Sequence[Any]] = {
    **STEPS,
    "epochs": (1,),
    "random-epochs": (False,),
    "steps": (0,),
    "random-steps": (False,),
}
"""The same, with what K takes the place of at its default."""


class State(NamedTuple):
    """What a client keeps: h [d], and x [d] and g of its last participation (g infinite: none)."""

    h: Vector
    x: Vector
    rate: Number


def first_state(theta: Vector) -> State:
    """Return the state of a client that has never taken part: h = 0, which (1) leaves so."""
    return State(h=0.0 * theta, x=theta, rate=math.inf)


def client_rule(
    state: State, theta: Vector, oracle: Oracle, *, catch_up: Vector | float, p: float
) -> Step:
    """Return the client's next state and its upload x - theta, by (1) and (2).

    ``catch_up`` is theta_i - theta, 0 for a client of the last round.
    """
    h = state.h + (p / state.rate) * (theta + catch_up - state.x)
    solved = oracle.solve(theta, Subproblem(slope=-h))
    return Step(solved.w - theta, State(h, solved.w, oracle.rate), solved=solved)


def server_rule(theta: Vector, moves: Iterable[Vector]) -> Vector:
    """Return the next model by (3), from the moves x_i - theta."""
    return theta + weighted_mean((move, 1.0) for move in moves)


def check_steps(algorithm: str, settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for local settings of other steps than (2)."""
    check_plain_steps(settings, f"{algorithm} takes plain gradient steps", STEPS)


class ServerState(NamedTuple):
    """What the server keeps: theta [d], and by round the model after it, if a client needs it."""

    theta: Vector
    models: Mapping[int, Vector]


class ProxSkip(FederatedStrategy):
    """ProxSkip's server half; see the module's docstring for the rule and every symbol.

    Raises ``ValueError`` for a ``local`` of other steps than (2), or that says how many.
    """

    algorithm = "proxskip"
    client_half = ClientHalf(client_rule, State, first_state, check=check_steps)
    card = Card(
        "ProxSkip",
        "control variates, and a random number of local steps between rounds",
        when="communication is expensive, and most clients take part",
        keeps="control variate, model",
        paper="Mishchenko et al., ICML 2022",
        arxiv="2202.09357",
    )
    averages = "changes"
    accumulates_changes = needs_exact_model = True
    folds = True

    p: float = number(
        default=0.1,
        about="Probability that a local step is the last of a round: 1/p steps on average.",
        above=0.0,
        high=1.0,
        sent="p",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_plain_steps(self.local, "ProxSkip takes 1/p plain gradient steps on average", DRAWN)

    @property
    def model_from_state(self) -> bool:
        return True

    def first_state(self, theta: Vector) -> ServerState:
        return ServerState(theta, {})

    def begin(self, state: ServerState, round: Round, num_rounds: int) -> ServerState:
        return state._replace(theta=round.theta)

    def client_config(self, state: ServerState, round: Round, client: int) -> Mapping[str, Any]:
        steps = int(stream(round.seed, "local-steps", round.number).geometric(self.p))
        return {"steps": steps, "random-steps": False, "lr": self.local.get("lr", RATE)}

    def catch_up(self, state: ServerState, since: int) -> Vector | None:
        model = state.models.get(since)
        if model is None or np.array_equal(model, state.theta.astype(model.dtype)):
            return None
        return model - state.theta

    def aggregate(self, state: ServerState, round: Round, uploads: Sequence[Upload]) -> Next:
        theta = server_rule(state.theta, (upload.vector for upload in uploads))
        last = {*{**round.acked, **{upload.client: upload.round for upload in uploads}}.values()}
        assert round.layout is not None
        sent = theta.astype(round.layout.dtype)  # as clients receive it
        models = {r: v for r, v in {**state.models, round.number: sent}.items() if r in last}
        return theta, ServerState(theta, models), {}
