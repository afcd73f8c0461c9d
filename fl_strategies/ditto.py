"""Ditto: FedAvg's global model, and for each client a personalized model that stays near it.

The global model is FedAvg's: the personalized models do not influence it. Round with theta, for
each client i of S:

    w_i   ~ argmin_w f_i(w), started at theta                                   (1)
    v_i+  ~ argmin_v f_i(v) + (lam/2) ||v - theta||^2, started at v_i           (2)
    theta <- sum_i p_i w_i / sum_i p_i                                          (3)

v_i     client i's personalized model [d], kept by the client: what evaluation reports as
        ``own-accuracy``; a newcomer has v_i = theta
lam     pull, >= 0: 0 is training alone, and the larger it is, the nearer v_i is to theta
p_i     weight of client i: its number of samples, or 1 ("uniform")

Both (1) and (2) are solved as ``local`` says, each with as many steps, so that a round takes twice
FedAvg's work. (2) leaves a model's running statistics as (1) made them: those of theta travel, and
v_i is measured with the statistics received.

Reference: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Schedule, number
from fl_strategies.core.oracle import Oracle, Step, both
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector
from fl_strategies.fedavg import Averaging
from fl_strategies.server.algorithm import Card


class State(NamedTuple):
    """What a client keeps: its personalized model v [d]."""

    v: Vector


def first_state(theta: Vector) -> State:
    """Return the state of a client that has never taken part: v = theta."""
    return State(theta)


def client_rule(state: State, theta: Vector, oracle: Oracle, *, lam: float) -> Step:
    """Return the client's next state, by (2), and its upload w, by (1)."""
    solved = oracle.solve(theta, Subproblem())
    personal = oracle.solve_aside(state.v, Subproblem(pull=lam, centre=theta))
    steps, epochs = solved.steps + personal.steps, both(solved.epochs, personal.epochs)
    return Step(solved.w, State(personal.w), solved=solved._replace(steps=steps, epochs=epochs))


class Ditto(Averaging):
    """Ditto's server half; see the module's docstring for the rule and every symbol."""

    algorithm = "ditto"
    client_half = ClientHalf(client_rule, State, first_state, own="v")
    card = Card(
        "Ditto",
        "FedAvg, and a personalized model in addition to the global model",
        when="personalized models are needed and the global model must stay FedAvg's",
        keeps="personalized model",
        paper="Li, Hu, Beirami, Smith, ICML 2021",
        arxiv="2012.04221",
    )
    lam: Schedule = number(
        default=0.1,
        about="Pull of the personalized model towards the global one; the paper tunes 0.05 ... 2.",
        low=0.0,
        scheduled=True,
        sent="lam",
    )

    @classmethod
    def most_steps(cls, config: Mapping[str, Any], local: float, samples: int) -> float:
        return 2 * local
