"""Momentum: the server adds a share of its last steps to each step.

    v    <- beta v + Delta                                                      (1)
    step  = lr v                                                                (2)

v     the server's memory [d], at first 0
beta  momentum, in [0, 1)
lr    server rate, > 0; with lr = 1 and beta = 0 the part changes no bit

Where a rule's fixed point is theta = aggregated, v is 0 there, and the fixed point stays. It is
Flower's ``FedAvgM``, with any algorithm.

Reference: Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification", 2019, Section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fl_strategies.core.hyperparameters import Schedule, number
from fl_strategies.core.schedules import at
from fl_strategies.core.vectors import Vector
from fl_strategies.parts.server_step import ServerStep, Stepped


class State(NamedTuple):
    """What the server keeps: v [d]."""

    v: Vector


def momentum(v: Vector, delta: Vector, *, lr: float, beta: float) -> tuple[Vector, Vector]:
    """Return the step and the next v, by (1) and (2)."""
    v = beta * v + delta
    return lr * v, v


class Momentum(ServerStep):
    """A share of the last steps is added; see the module's docstring."""

    name = "momentum"
    about = "adds a share of the last steps to each step"
    paper = "Hsu, Qi, Brown, 2019"
    lr: Schedule = number(default=1.0, about="Server rate.", above=0.0, scheduled=True)
    beta: Schedule = number(
        default=0.9, about="Momentum; the paper's by default.", low=0.0, below=1.0, scheduled=True
    )

    def begin(self, state: State | None, theta: Vector) -> State:
        return State(np.zeros_like(theta)) if state is None else state

    def step(
        self,
        state: State,
        theta: Vector,
        delta: Vector,
        server_round: int,
        spread: Callable[[], float],
    ) -> Stepped:
        lr, beta = at(self.lr, server_round), at(self.beta, server_round)
        step, v = momentum(state.v, delta, lr=lr, beta=beta)
        return step, State(v), {}
