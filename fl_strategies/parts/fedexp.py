"""FedExP: the server goes beyond the mean, the further the more clients disagree.

    e     = max(1, sum_i p_i ||w_i - theta||^2 / (2 (||Delta||^2 + eps)))       (1)
    step  = e Delta                                                             (2)
    shown = (theta + theta_before) / 2                                          (3)

p_i           weight of client i in the rule's mean, their sum being 1
e             "server-rate" in a round's numbers
eps           > 0: with it e stays bounded as Delta goes to 0
theta_before  the model before the last step, kept by the server

The iterates swing, while their mean goes on. So (3) is the model that ``evaluate_fn``, clients'
evaluation, callbacks and the result get; theta is what trains and what checkpoints hold. A further
``start`` begins with the model that it is given, and there shown = theta.

(1) is the step of projections: it is derived for the mean of models that can all fit their data. If
clients disagree at the optimum, e grows near it up to sum_i p_i ||w_i - theta||^2 / (2 eps), and a
small eps keeps theta from settling there.

Reference: Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation",
ICLR 2023, Algorithm 1 and Section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fl_strategies.core.hyperparameters import number
from fl_strategies.core.vectors import Vector
from fl_strategies.parts.part import FREE_MODEL, MEAN_OF_MODELS
from fl_strategies.parts.server_step import ServerStep, Stepped


class State(NamedTuple):
    """What the server keeps: the model before the last step, theta_before [d]."""

    before: Vector


def extrapolation(delta: Vector, spread: float, *, eps: float) -> float:
    """Return e, by (1), with ``spread`` = sum_i p_i ||w_i - theta||^2."""
    return max(1.0, spread / (2 * (float(np.dot(delta, delta)) + eps)))


class FedExP(ServerStep):
    """The step grows with the clients' disagreement; see the module's docstring."""

    name = "fedexp"
    about = "goes beyond the mean, the further the more clients disagree"
    paper = "Jhunjhunwala, Wang, Joshi, ICLR 2023"
    needs = (FREE_MODEL, MEAN_OF_MODELS)
    needs_distances = shows_another = True
    eps: float = number(default=1e-3, about="In (1).", above=0.0)

    def begin(self, state: State | None, theta: Vector) -> State:
        return State(theta)

    def step(
        self,
        state: State,
        theta: Vector,
        delta: Vector,
        server_round: int,
        spread: Callable[[], float],
    ) -> Stepped:
        e = extrapolation(delta, spread(), eps=self.eps)
        return e * delta, State(theta), {"server-rate": e}

    def shown(self, state: State, theta: Vector) -> Vector:
        return (theta + state.before) / 2
