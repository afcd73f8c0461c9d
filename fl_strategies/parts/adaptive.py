"""Adam, Yogi and Adagrad at the server: each number of the model has its own step size.

    m    <- beta_1 m + (1 - beta_1) Delta                                       (1)
    v    <- v + Delta^2                                    Adagrad              (2)
    v    <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)     Yogi                 (3)
    v    <- beta_2 v + (1 - beta_2) Delta^2                Adam                 (4)
    step  = lr m / (sqrt(v) + tau)                                              (5)

m, v  the server's memory [d]; m at first 0, v at first v_0
lr    server rate, > 0
tau   adaptivity, > 0: the larger, the nearer (5) is to momentum with the rate lr / tau

Where a rule's fixed point is theta = aggregated, m is 0 there, and the fixed point stays. The paper
has v_0 >= tau^2, which is the default here, and no bias correction. Flower's classes begin with v_0
= 0, and its ``FedAdam`` takes the rate of its t-th round, t = 1, 2 ..., times

    sqrt(1 - beta_2^(t+1)) / (1 - beta_1^(t+1))                                 (6)

``v_0=0.0`` and ``Adam(bias_correction="flower")`` are these; a skipped round does not count in t.

Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive Federated
Optimization", ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from fl_strategies.core.hyperparameters import Schedule, choice, number
from fl_strategies.core.schedules import at
from fl_strategies.core.vectors import Vector
from fl_strategies.parts.server_step import ServerStep, Stepped


class State(NamedTuple):
    """What the server keeps: m [d], v [d], and the number t of steps taken."""

    m: Vector
    v: Vector
    t: int


class Adaptive(ServerStep):
    """Base of the three: (1), (5) and the hyperparameters of both."""

    paper = "Reddi et al., ICLR 2021"
    lr: Schedule = number(default=0.1, about="Server rate.", above=0.0, scheduled=True)
    beta_1: float = number(default=0.9, about="Memory of (1).", low=0.0, below=1.0)
    tau: float = number(default=1e-3, about="Adaptivity of (5).", above=0.0, high=1e9)
    v_0: float | None = number(default=None, about="First v; by default tau^2.", low=0.0, high=1e18)

    def second_moment(self, v: Vector, squared: Vector) -> Vector:
        """Return the next v from Delta^2."""
        raise NotImplementedError

    def correction(self, t: int) -> float:
        """Return the factor of the rate in the t-th step."""
        return 1.0

    def begin(self, state: State | None, theta: Vector) -> State:
        v_0 = self.tau**2 if self.v_0 is None else self.v_0
        return State(np.zeros_like(theta), np.full_like(theta, v_0), 0) if state is None else state

    def step(
        self,
        state: State,
        theta: Vector,
        delta: Vector,
        server_round: int,
        spread: Callable[[], float],
    ) -> Stepped:
        m = self.beta_1 * state.m + (1 - self.beta_1) * delta
        v, t = self.second_moment(state.v, delta * delta), state.t + 1
        rate = at(self.lr, server_round) * self.correction(t)
        return rate * m / (np.sqrt(v) + self.tau), State(m, v, t), {}


class Adagrad(Adaptive):
    """(1), (2) and (5); see the module's docstring."""

    name = "adagrad"
    about = "step sizes that fall with the sum of squared changes"
    beta_1: float = number(default=0.0, about="Memory of (1).", low=0.0, below=1.0)

    def second_moment(self, v: Vector, squared: Vector) -> Vector:
        return v + squared


class Yogi(Adaptive):
    """(1), (3) and (5); see the module's docstring."""

    name = "yogi"
    about = "as Adam, with step sizes that change more slowly"
    lr: Schedule = number(default=0.01, about="Server rate.", above=0.0, scheduled=True)
    beta_2: float = number(default=0.99, about="Memory of (3).", low=0.0, below=1.0)

    def second_moment(self, v: Vector, squared: Vector) -> Vector:
        return v - (1 - self.beta_2) * squared * np.sign(v - squared)


class Adam(Adaptive):
    """(1), (4) and (5); see the module's docstring."""

    name = "adam"
    about = "step sizes by the mean square of the last changes"
    beta_2: float = number(default=0.99, about="Memory of (4).", low=0.0, below=1.0)
    bias_correction: Literal["flower"] | None = choice(
        default=None, choices=("flower",), about="Whether the rate is taken times (6)."
    )

    def second_moment(self, v: Vector, squared: Vector) -> Vector:
        return self.beta_2 * v + (1 - self.beta_2) * squared

    def correction(self, t: int) -> float:
        if self.bias_correction is None:
            return 1.0
        return float(np.sqrt(1 - self.beta_2 ** (t + 1)) / (1 - self.beta_1 ** (t + 1)))
