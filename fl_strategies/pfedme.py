"""pFedMe: personalized models tied to a global model that descends on Moreau envelopes.

The problem is  min_w (1/m) sum_i F_i(w)  with the envelope
F_i(w) = min_theta f_i(theta) + (lambda/2) ||theta - w||^2: its minimiser theta_i(w) is client i's
personalized model, and its gradient is lambda (w - theta_i(w)). Round with the model w received,
for each client i of S:

    w_0 = w;  r = 0 ... R-1, each on a fresh mini-batch:
    theta ~ argmin  f_i(theta) + (lambda/2) ||theta - w_r||^2, K steps          (1)
    w_{r+1} = w_r - eta lambda (w_r - theta)                                    (2)
    w <- (1 - beta) w + beta sum_{i in S} p_i w_{i,R} / sum_{i in S} p_i        (3)

theta   client's personalized model [d], kept by the client: the next (1) starts from it, and
        evaluation reports its accuracy as ``own-accuracy``; a newcomer has theta = w
R       the ``steps`` or ``epochs`` of ``local``, where an epoch is as many r as the client has
        mini-batches (paper: R = 20 mini-batches of 20 samples)
K       ``inner_steps`` of the solver of ``local``, all on the same mini-batch; fewer if
        ``residual`` (the paper's nu) is reached before
lambda  pull, > 0; gradient steps of rate lr on (1) are stable if lr (lambda + curvature) < 2
eta     rate of (2), > 0; up to 1/lambda, w_{r+1} lies between w_r and theta
beta    server rate, > 0; with 1, (3) is the mean, above 1 it goes beyond (paper: 1 ... 4)
p_i     1 as published ("uniform"), or the client's number of training samples ("samples")

Facts. With (1) solved exactly on full batches, (2) is gradient descent on F_i; with R = 1 as well,
and all clients in S, the fixed point is the minimiser of the mean of the envelopes, whatever eta
and beta. With R > 1 the fixed point is not that minimiser, as FedAvg's is not the
minimiser of the mean loss. As lambda grows with eta lambda fixed, theta_i comes near w, and (2)
becomes gradient descent on f_i.

Deviations of the authors' published code. (1) starts a round from w (``local_start="global"``), and
uploads have weights by samples (``weights="samples"``): together ``PFedMe.authors_rule``. All
clients train in every round, and the server averages some of them. The personalized models are
aliases of the live parameters; here theta is a copy.

Reference: Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS
2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from fl_strategies import fedavg
from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Schedule, choice, count_of, largest, number
from fl_strategies.core.oracle import Oracle, Step, Tally
from fl_strategies.core.records import Mean, Round, Upload
from fl_strategies.core.schedules import at
from fl_strategies.core.stacks import repeated
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector, weighted_mean
from fl_strategies.fedavg import Averaging, Weights
from fl_strategies.server.algorithm import Card, Next
from fl_strategies.server.algorithm import State as ServerState
from fl_strategies.server.composition import Averages
from fl_strategies.solvers.own_steps import check_plain_steps

Side: TypeAlias = Literal["client", "global"]


class State(NamedTuple):
    """What a client keeps: its personalized model theta."""

    theta: Vector


def first_state(w: Vector) -> State:
    """Return the state of a client that has never taken part: theta = w."""
    return State(w)


def client_rule(
    state: State,
    w: Vector,
    oracle: Oracle,
    *,
    lam: float,
    eta: float,
    inner_steps: int,
    local_start: Side = "client",
) -> Step:
    """Return the client's next state and its upload w_R, by R times (1) and (2).

    Loss and accuracy are theta's before the last step on each mini-batch, and ``residual`` is that
    of (1) after this step: means over the mini-batches.
    """
    steps = oracle.steps

    def outer_step(theta: Vector, w: Vector, done: Tally) -> tuple[Vector, Vector, Tally]:
        subproblem = Subproblem(pull=lam, centre=w)
        solved = oracle.solve_on_next(theta, subproblem, steps=inner_steps)
        return solved.w, w - eta * lam * (w - solved.w), done.plus(solved)

    start = state.theta if local_start == "client" else w
    theta, w, done = repeated(steps, outer_step, start, w, Tally())
    return Step(w, State(theta), solved=done.mean(w, steps, epochs=None))


def server_rule(
    w: Vector,
    uploads: Iterable[tuple[Vector, float]],
    *,
    beta: float,
    mean: Mean = weighted_mean,
) -> Vector:
    """Return the next global model, by (3), from each client's (w_i, p_i)."""
    return (1 - beta) * w + beta * fedavg.server_rule(uploads, mean=mean)


class PFedMe(Averaging):
    """pFedMe's server half; see the module's docstring for the rule and every symbol."""

    algorithm = "pfedme"
    client_half = ClientHalf(client_rule, State, first_state, own="theta")
    card = Card(
        "pFedMe",
        "personalized models tied to the global model by a Moreau envelope",
        when="personalized models are needed on strongly non-IID data",
        keeps="personalized model",
        paper="Dinh, Tran, Nguyen, NeurIPS 2020",
        arxiv="2006.08848",
    )
    averages = "models"
    folds = weighs = True
    authors_rule: ClassVar[Mapping[str, str]] = {"local_start": "global", "weights": "samples"}

    lam: Schedule = number(
        default=15.0, about="Pull; the paper's by default.", above=0.0, scheduled=True, sent="lam"
    )
    eta: Schedule = number(
        default=0.005,
        about="Rate of (2); the paper's by default.",
        above=0.0,
        scheduled=True,
        sent="eta",
    )
    beta: Schedule = number(default=1.0, about="Server rate.", above=0.0, scheduled=True)
    inner_steps: int = number(
        default=5, about="K; the paper's by default.", integer=True, low=1, sent="inner-steps"
    )
    local_start: Side = choice(
        default="client",
        choices=("client", "global"),
        about="Whether the first (1) of a round starts from the client's own theta or from w.",
        sent="local-start",
    )
    weights: Weights = choice(
        default="uniform",
        choices=("samples", "uniform"),
        about="Whether p_i is the number of samples, or 1.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        one_batch = {"variance-reduction": ("off",)}
        why = "pFedMe's local steps are all on one mini-batch"
        check_plain_steps(self.local, why, one_batch)
        if self.beta != 1.0 and self.server_step is not None and self.server_step.needs_distances:
            name = type(self.server_step).__name__
            raise ValueError(f"{name} sets how long the step is; beta must be 1, got {self.beta}")

    @property
    def mean_of(self) -> Averages:
        # above 1, one client moves w by more than its share of the mean
        return self.averages if largest(self.beta) <= 1.0 else ""

    @classmethod
    def most_steps(cls, config: Mapping[str, Any], local: float, samples: int) -> float:
        return local * count_of(config, "inner-steps")

    def aggregate(self, state: ServerState, round: Round, uploads: Sequence[Upload]) -> Next:
        beta, mean = at(self.beta, round.number), round.mean
        w = server_rule(round.theta, self.weighted(round, uploads), beta=beta, mean=mean)
        return w, state, {}
