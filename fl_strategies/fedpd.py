"""FedPD: primal-dual steps by all clients; communication is skipped at random.

Each client has a model, a dual variable and its own copy of the global model. In algorithm round
r = 0, 1, ... every client i computes, by the steps (a)-(d) of ``fl_strategies.skipping``,

    x+ ~ argmin_w  f_i(w) + <lam, w - x0> + (1/(2 eta)) ||w - x0||^2, started at x      (1)
    lam+, x0+ by the dual step (a), (b)                                                 (2)
    x0 <- mean of all x0+, with probability 1 - p; else each client's own x0+           (3)

(1) by any solver, the paper's: Q steps of GD or SGD. This is the paper's oracle I; its oracle II is
``fl_strategies.fedpd_vr``.

x, lam  client's model and dual variable [d]; at its first participation x = x0, lam = 0
x0      the global model [d], or between communication rounds the client's copy of it
eta     pull 1/eta, > 0; the theory wants eta < (sqrt5 - 1)/(4 L) where each f_i is L-smooth
p       probability that communication is skipped, in [0, 1)

A client keeps (x, lam). Rounds without communication cost no message: a request names the rounds up
to the next communication round.

Fixed points have x_i = x0 and lam_i = -grad f_i(x0) with sum lam_i = 0 over all clients: stationary
points of the mean of all f_i, whatever the duals summed to before.

Deviation from the paper, whose SGD draws the samples of each step anew, from all (eq. 7): an
epoch's mini-batches are a permutation of the client's samples.

Deviation of the authors' published code, an option: x0+ = x0 + eta lam+
(``x0_rule="authors"``, in ``FedPD.authors_rule``).

Reference: Zhang, Hong, Dhople, Yin, Liu, "FedPD: A Federated Learning Framework with Adaptivity to
Non-IID Data", IEEE Transactions on Signal Processing 2021, Algorithms 2 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Scalar
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector
from fl_strategies.server.algorithm import Card
from fl_strategies.skipping import SkippingStrategy, X0Rule, consensus, dual_step, rounds_of


class State(NamedTuple):
    """What a client keeps: its model x and its dual variable lam."""

    x: Vector
    lam: Vector


def first_state(x0: Vector) -> State:
    """Return the state of a client that has never taken part: x = x0, lam = 0."""
    return State(x=x0, lam=0.0 * x0)


def client_rule(
    state: State, x0: Vector, oracle: Oracle, *, eta: float, x0_rule: X0Rule = "paper"
) -> Step:
    """Return the client's next state and its upload x0+, by (1) and (2).

    It reports ``consensus``, ||x+ - x0||^2; of several rounds, that of the last.
    """
    solved = oracle.solve(state.x, Subproblem(slope=state.lam, pull=1.0 / eta, centre=x0))
    x = solved.w
    lam, x0_new = dual_step(x, x0, state.lam, eta=eta, x0_rule=x0_rule)
    return Step(x0_new, State(x, lam), consensus(x, x0), solved)


class FedPD(SkippingStrategy):
    """FedPD's server half; see the module's docstring for the rule and every symbol."""

    algorithm = "fedpd"
    client_half = ClientHalf(client_rule, State, first_state, own="x", rounds=rounds_of)
    card = Card(
        "FedPD",
        "primal-dual steps by all clients; skips communication rounds at random",
        when="all clients take part and communication is expensive",
        keeps="model, dual",
        paper="Zhang et al., IEEE TSP 2021",
        arxiv="2005.11418",
    )
    paper_rule: ClassVar[Mapping[str, Any]] = {"eta": 1.0, "x0_rule": "paper"}
    paper_local: ClassVar[Mapping[str, Scalar]] = {"lr": 0.01, "steps": 300, "batch-size": 2}
    authors_rule: ClassVar[Mapping[str, Any]] = {"x0_rule": "authors"}
    authors_local: ClassVar[Mapping[str, Scalar]] = {"solver": "gd", "epochs": 8}
