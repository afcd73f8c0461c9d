"""FedPDVR: FedPD whose local steps use variance-reduced gradients (the paper's oracle II).

Each client has a model, a dual variable, its own copy of the global model, and an estimate of its
gradient. In algorithm round r = 0, 1, ... every client i computes, by the steps (a)-(d) of
``fl_strategies.skipping``,

    g  = grad f_i(x) if r mod I = 0                                             (1)
    Q times:                                                                    (2)
        x'  = eta/(eta+gamma) x + gamma/(eta+gamma) x0 - eta gamma/(eta+gamma) (g + lam)
        g  += mean over B samples of (grad at x' - grad at x), the same samples for both
        x   = x'
    x+ = x;  lam+, x0+ by the dual step (a), (b)                                (3)
    x0 <- mean of all x0+, with probability 1 - p; else each client's own x0+   (4)

x, lam  client's model and dual variable [d]; at its first participation x = x0, lam = 0
x0      the global model [d], or between communication rounds the client's copy of it
g       estimate of grad f_i [d]; the full gradient at a first participation
eta, p  as for FedPD
gamma, Q, B, I    rate, steps, samples a step, rounds from full gradient to full one

A client keeps (x, lam, g). It runs no local solver, and needs full gradients of f_i: a client
without them, whose problem streams its samples, answers with an error that says so.

Fixed points are FedPD's, with g = grad f_i(x0). The noise of (2) is that of differences of
gradients, which vanish there: B = 1 reaches a stationary point exactly, where SGD does not.

Q, B and I are those of the paper's Fig. 2 (``FedPDVR.paper_rule``), which does not say eta and
gamma. Deviation of the authors' published code, an option: x0+ = x0 + eta lam+
(``x0_rule="authors"``, in ``FedPDVR.authors_rule``).

Reference: Zhang, Hong, Dhople, Yin, Liu, "FedPD: A Federated Learning Framework with Adaptivity to
Non-IID Data", IEEE Transactions on Signal Processing 2021, Algorithms 2 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Scalar, Schedule, count_of, number
from fl_strategies.core.oracle import Oracle, Step, Tally
from fl_strategies.core.stacks import choose, repeated
from fl_strategies.core.vectors import Vector
from fl_strategies.server.algorithm import Card
from fl_strategies.skipping import SkippingStrategy, X0Rule, consensus, dual_step, rounds_of


class State(NamedTuple):
    """What a client keeps: x, lam and g (``[..., 0]`` while it has none)."""

    x: Vector
    lam: Vector
    g: Vector


def first_state(x0: Vector) -> State:
    """Return the state of a client that has never taken part: x = x0, lam = 0, no g."""
    return State(x=x0, lam=0.0 * x0, g=x0[..., :0])


def client_rule(
    state: State,
    x0: Vector,
    oracle: Oracle,
    *,
    eta: float,
    gamma: float,
    inner_steps: int,
    inner_batch: int,
    full_every: int,
    round: int,
    x0_rule: X0Rule = "paper",
) -> Step:
    """Return the client's next state and its upload x0+, by (1)-(3).

    ``inner_steps`` is Q, ``inner_batch`` B (0: all), ``full_every`` I and ``round`` r. It reports
    ``consensus``, ||x+ - x0||^2; of several rounds, that of the last.
    """
    x, lam, g = state
    refresh = round % full_every == 0
    if g.shape[-1] == 0:
        g = oracle.full_gradient(x)
    elif refresh is not False:
        g = choose(refresh, oracle.full_gradient(x), g)

    def step(x: Vector, g: Vector, done: Tally) -> tuple[Vector, Vector, Tally]:
        x_new = (eta * x + gamma * x0 - eta * gamma * (g + lam)) / (eta + gamma)
        change = oracle.difference(x_new, x, samples=inner_batch)
        return x_new, g + change.vector, done.plus(change)

    x, g, done = repeated(inner_steps, step, x, g, Tally())
    lam_new, x0_new = dual_step(x, x0, lam, eta=eta, x0_rule=x0_rule)
    solved = done.mean(x, inner_steps, epochs=None)
    return Step(x0_new, State(x, lam_new, g), consensus(x, x0), solved)


class FedPDVR(SkippingStrategy):
    """FedPDVR's server half; see the module's docstring for the rule and every symbol.

    Of ``local``, only what ``fine-tune`` needs is allowed; other settings raise ``ValueError``.
    """

    algorithm = "fedpd-vr"
    client_half = ClientHalf(client_rule, State, first_state, own="x", rounds=rounds_of)
    card = Card(
        "FedPDVR",
        "FedPD whose local steps use variance-reduced gradients",
        when="as for FedPD, and full gradients are affordable",
        keeps="model, dual, gradient",
        paper="Zhang et al., IEEE TSP 2021",
        arxiv="2005.11418",
    )
    uses_local = False
    paper_rule: ClassVar[Mapping[str, Any]] = {
        "inner_steps": 8,
        "inner_batch": 1,
        "full_every": 20,
        "x0_rule": "paper",
    }
    paper_local: ClassVar[Mapping[str, Scalar]] = {}
    authors_rule: ClassVar[Mapping[str, Any]] = {**paper_rule, "x0_rule": "authors"}
    authors_local: ClassVar[Mapping[str, Scalar]] = {}

    gamma: Schedule = number(
        default=1.0, about="Rate of (2).", above=0.0, scheduled=True, sent="gamma"
    )
    inner_steps: int = number(default=8, about="Q.", integer=True, low=1, sent="inner-steps")
    inner_batch: int = number(
        default=1,
        about="B; 0: all samples. The samples are drawn with replacement.",
        integer=True,
        low=0,
        sent="inner-batch",
    )
    full_every: int = number(default=20, about="I.", integer=True, low=1, sent="full-every")

    @classmethod
    def most_steps(cls, config: Mapping[str, Any], local: float, samples: int) -> float:
        # a step on more samples than the client has counts as several steps
        passes = math.ceil(int(config.get("inner-batch", 1)) / samples)
        steps = count_of(config, "inner-steps") * max(1, passes)
        return super().most_steps(config, steps, samples)
