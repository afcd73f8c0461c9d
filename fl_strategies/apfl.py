"""APFL: FedAvg, and for each client a mixture of the global model and a local one.

The client trains FedAvg's w as ever. In each step it also trains its local model v, by the gradient
at the mixture of the two, and learns by that gradient how much of v is good for it. Round with
theta, for each client i of S, with w = theta at first; each gradient g is that of f_i on a fresh
mini-batch. At each of the steps of ``local``:

    u  <- alpha v + (1 - alpha) w                                               (1)
    w+ <- w - lr g(w)                                                           (2)
    v+ <- v - lr alpha g(u)                                                     (3)
    alpha+ <- min(max(alpha - lr <v - w, g(u)>, 0), 1)                          (4)

and in the end

    theta <- sum_i p_i w_i / sum_i p_i                                          (5)

v       client i's local model [d], kept by the client; a newcomer has v = theta
alpha   share of v in the mixture, in [0, 1], kept by the client; at first the hyperparameter, where
        it stays with ``adaptive=False``
u       the personalized model: (1) of the last v, alpha and w of a round. The client keeps it, as
        what evaluation reports as ``own-accuracy``
lr      the learning rate of ``local``
p_i     weight of client i: its number of samples, or 1 ("uniform")

(3) and (4) are the gradients of f_i(u) by v and by alpha. The global model is FedAvg's with plain
steps: v and alpha do not influence it. A step takes two gradients, and each of them updates running
statistics. Without (4), alpha = 0 has u = w, and with alpha = 1 u = v is local training alone.

Deviations. The paper has one mini-batch for both gradients of a step. Its authors' code steps v at
the w of after (2); mixes the outputs of both models, not the models, which is the same for linear
ones; and moves alpha in the first step of a round alone, with a penalty 0.01 alpha^2 in addition.

Reference: Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, Algorithm 1 and
Section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import flag, number
from fl_strategies.core.oracle import Oracle, Step, Tally
from fl_strategies.core.stacks import clip, dot, for_each, repeated
from fl_strategies.core.vectors import Number, Vector
from fl_strategies.fedavg import Averaging
from fl_strategies.server.algorithm import Card
from fl_strategies.solvers.own_steps import check_own_steps


class State(NamedTuple):
    """What a client keeps: v [d], alpha, and its personalized model u [d]."""

    v: Vector
    alpha: Number
    u: Vector


def first_state(theta: Vector, *, alpha: float) -> State:
    """Return the state of a client that has never taken part: v = u = theta."""
    return State(theta, alpha, theta)


def mixture(v: Vector, alpha: Number, w: Vector) -> Vector:
    """Return u, by (1)."""
    return w + alpha * (v - w)


def client_rule(state: State, theta: Vector, oracle: Oracle, *, adaptive: bool) -> Step:
    """Return the client's next state, and its upload w, by (1)-(4).

    The loss is the mean over the mini-batches of all its gradients.
    """
    steps, rate = oracle.steps, oracle.rate

    def step(
        w: Vector, v: Vector, alpha: Number, done: Tally
    ) -> tuple[Vector, Vector, Number, Tally]:
        here, there = oracle.gradient(w), oracle.gradient(mixture(v, alpha, w))
        moved = v - rate * alpha * there.vector
        if adaptive:
            alpha = clip(alpha - rate * dot(v - w, there.vector), 0.0, 1.0)
        return w - rate * here.vector, moved, alpha, done.plus(here)

    alpha = for_each(state.alpha, theta)
    w, v, alpha, done = repeated(steps, step, theta, state.v, alpha, Tally())
    solved = done.mean(w, done.steps, steps=steps, epochs=None)
    return Step(w, State(v, alpha, mixture(v, alpha, w)), solved=solved)


class APFL(Averaging):
    """APFL's server half; see the module's docstring for the rule and every symbol.

    Of ``local``, (2) uses ``lr``, ``epochs``, ``random-epochs``, ``steps``, ``random-steps`` and
    ``batch-size``. Raises ``ValueError`` for settings that ask for other than plain gradient steps.
    """

    algorithm = "apfl"
    client_half = ClientHalf(client_rule, State, first_state, own="u", check=check_own_steps)
    card = Card(
        "APFL",
        "mixes the global model with a local one, by a learnt share",
        when="clients must find out how much of the global model suits them",
        keeps="two models, one number",
        paper="Deng, Kamani, Mahdavi, 2020",
        arxiv="2003.13461",
    )
    alpha: float = number(
        default=0.5, about="First share of the local model.", low=0.0, high=1.0, sent="alpha"
    )
    adaptive: bool = flag(
        default=True, about="Whether each client learns its alpha, by (4).", sent="adaptive"
    )

    def __post_init__(self) -> None:
        check_own_steps(self.algorithm, self.local)
        super().__post_init__()

    @classmethod
    def most_steps(cls, config: Mapping[str, Any], local: float, samples: int) -> float:
        return 2 * local
