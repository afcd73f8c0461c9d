"""pFedMe: personal models tied to the common one, which descends on their Moreau envelopes.

The problem is  min_w (1/m) sum_i F_i(w)  with the envelope
F_i(w) = min_theta f_i(theta) + (lambda/2) ||theta - w||^2: its minimiser theta_i(w) is client i's
own model, and its gradient is lambda (w - theta_i(w)). Round with the model w received, for each
client i of S:

    w_0 = w;  r = 0 ... R-1, each on a fresh mini-batch:
    theta ~ argmin  f_i(theta) + (lambda/2) ||theta - w_r||^2, K steps          (1)
    w_{r+1} = w_r - eta lambda (w_r - theta)                                    (2)
    w <- (1 - beta) w + beta sum_{i in S} p_i w_{i,R} / sum_{i in S} p_i        (3)

theta   client's own model [d], kept by the client: where (1) starts next, and what evaluation
        reports as ``own-accuracy``; a newcomer has theta = w
R       the ``steps`` or ``epochs`` of ``local``, where an epoch is as many r as the client has
        mini-batches (paper: R = 20 mini-batches of 20 examples)
K       ``inner_steps`` of the solver of ``local``, all on the same mini-batch; fewer where
        ``residual`` (the paper's nu) is reached before
lambda  pull, > 0; a gradient step of rate lr on (1) wants lr (lambda + curvature) < 2
eta     rate of (2), > 0; up to 1/lambda, w_{r+1} lies between w_r and theta
beta    server rate, > 0; 1 is the plain mean, above 1 goes beyond it (paper: 1 ... 4)
p_i     1 as published ("uniform"), or the client's number of training examples ("examples")

Facts. With (1) solved exactly on full batches, (2) is gradient descent on F_i; with R = 1 as well,
and all clients in S, the fixed point is the minimiser of the mean of the envelopes, whatever eta
and beta. With R > 1 it is off it as FedAvg's is off the minimiser of the mean loss. As lambda grows
with eta lambda fixed, theta_i comes near w and (2) is gradient descent on f_i itself.

Deviations of the authors' published code. (1) starts a round from w (``local_start="global"``), and
uploads weigh by examples (``weights="examples"``): together ``PFedMe.authors_rule``. All clients
train in every round there, of which some are averaged. Its personal models are aliases of the live
parameters; theta is kept by value here.

Reference: Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS
2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, NamedTuple, TypeAlias, Unpack

from fl_strategies import fedavg
from fl_strategies.fedavg import Averaging, Weights
from fl_strategies.schedules import Knob, at, check, one_of, values
from fl_strategies.strategy import Knobs, Options, Upload
from fl_strategies.subproblem import Solve, Subproblem, Vector

Side: TypeAlias = Literal["client", "global"]


class State(NamedTuple):
    """What a client keeps: its own model theta."""

    theta: Vector


def first_state(w: Vector) -> State:
    """Return the state of a client that has never taken part: theta = w."""
    return State(w)


def client_rule(
    state: State,
    w: Vector,
    solve: Solve,
    *,
    lam: float,
    eta: float,
    steps: int,
    local_start: Side = "client",
) -> tuple[State, Vector]:
    """Return the client's next state and its upload w_R, by ``steps`` = R times (1) and (2).

    Each call of ``solve`` is on a fresh mini-batch.
    """
    theta = state.theta if local_start == "client" else w
    for _ in range(steps):
        theta = solve(theta, Subproblem(pull=lam, centre=w))
        w = w - eta * lam * (w - theta)
    return State(theta), w


def server_rule(w: Vector, uploads: Iterable[Upload], *, beta: float, weights: Weights) -> Vector:
    """Return the next common model, by (3)."""
    return (1 - beta) * w + beta * fedavg.server_rule(uploads, weights=weights)


class PFedMe(Averaging):
    """pFedMe's server half; see the module's docstring for the rule and every symbol.

    Parameters
    ----------
    lam : float > 0 (default 15, the paper's)
    eta : float > 0 (default 0.005, the paper's)
    beta : float > 0 (default 1)
    inner_steps : int >= 1 (default 5, the paper's)
    local_start : "client" or "global" (default "client")
        Whether a round's first (1) is started from the client's own theta or from w.
    weights : "uniform" or "examples" (default "uniform")
    **options
        Those of :class:`fl_strategies.FederatedStrategy`.

    Raises
    ------
    ValueError
        For a knob outside its range.
    """

    algorithm = "pfedme"
    authors_rule: ClassVar[Mapping[str, str]] = {"local_start": "global", "weights": "examples"}

    def __init__(
        self,
        *,
        lam: Knob = 15.0,
        eta: Knob = 0.005,
        beta: Knob = 1.0,
        inner_steps: int = 5,
        local_start: Side = "client",
        weights: Weights = "uniform",
        **options: Unpack[Options],
    ) -> None:
        for name, value in (("lam", lam), ("eta", eta), ("beta", beta)):
            check(name, value, above=0.0, scheduled=True)
        check("inner_steps", inner_steps, low=1, integer=True)
        one_of("local_start", local_start, ("client", "global"))
        super().__init__(weights=weights, **options)
        self.lam, self.eta, self.beta, self.inner_steps = lam, eta, beta, inner_steps
        self.local_start = local_start
        if max(values(beta)) > 1.0:  # then one client moves w by more than its share of the mean
            self.averages = ""

    def client_knobs(self) -> Knobs:
        return {
            "lam": self.lam,
            "eta": self.eta,
            "inner-steps": self.inner_steps,
            "local-start": self.local_start,
        }

    def aggregate(
        self, server_round: int, theta: Vector, uploads: Iterable[Upload], used: int
    ) -> Vector:
        return server_rule(theta, uploads, beta=at(self.beta, server_round), weights=self.weights)
