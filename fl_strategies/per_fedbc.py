"""Per-FedBC: FedBC whose clients look for a model that one local gradient step personalizes.

The local work is first-order model-agnostic meta-learning (MAML). An outer step begins with a few
inner steps on the penalised local problem; then it steps from where they began, along the gradient
at the point where they ended. Round with the model z received, for each client i of S, on a fresh
mini-batch for every gradient g:

    w <- z;  K times:  u <- w;  J times:  u <- u - a (g(u) + 2 lambda (u - z))  (1)
                       w <- w - b g(u)                                          (2)
    x+ = w;  lambda+, gamma+ by the dual step of ``fl_strategies.proximity``    (3)
    z <- sum_{i in S} lambda+_i x+_i / sum_{i in S} lambda+_i                   (4)

K       outer steps: the ``steps`` or ``epochs`` of ``local``, where an epoch is as many outer steps
        as the client has mini-batches
b       outer rate: the ``lr`` of ``local`` (paper 0.001)
a, J    inner rate (paper 0.01) and inner steps (paper 1)

Kept by the client: x, lambda, gamma, as in FedBC. (2) has neither the penalty nor second
derivatives: with inner rate 0 and lambda fixed Per-FedBC is FedAvg with uniform weights.

Deviations of the authors' published code. The code accepts b but never uses it, and (2) steps by a:
for its numbers set ``lr`` to ``inner_rate``, as ``authors_local`` does. It has
``dual_momentum=0.5``, as for FedBC (``PerFedBC.authors_rule``). It
measures z after one inner step on the client's TEST data, which is ``tuned-accuracy`` with
``fine-tune="test-batch"`` in ``local``; ``"train"`` does the same without test data.

Reference: see ``fl_strategies.fedbc``; Algorithm 3, appendix E.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Scalar, Schedule, count_of, number
from fl_strategies.core.oracle import Oracle, Step, Tally
from fl_strategies.core.stacks import repeated
from fl_strategies.core.vectors import Vector
from fl_strategies.proximity import (
    FIRST,
    READS,
    Dual,
    ProximityStrategy,
    State,
    Turn,
    dual_step,
    first_state,
    idle_steps,
    uploaded,
)
from fl_strategies.server.algorithm import Card
from fl_strategies.solvers.own_steps import check_own_steps, tuned_at


def outer_step(
    w: Vector,
    z: Vector,
    oracle: Oracle,
    done: Tally,
    *,
    lam: float,
    inner_rate: float,
    inner_steps: int,
    rate: float,
) -> tuple[Vector, Tally]:
    """Return w after one outer step, by (1) and (2), and ``done`` with its gradients."""

    def inner_step(u: Vector, done: Tally) -> tuple[Vector, Tally]:
        here = oracle.gradient(u)
        return u - inner_rate * (here.vector + 2 * lam * (u - z)), done.plus(here)

    u, done = repeated(inner_steps, inner_step, w, done)
    there = oracle.gradient(u)
    return w - rate * there.vector, done.plus(there)


def client_rule(
    state: State,
    z: Vector,
    oracle: Oracle,
    *,
    dual: Dual,
    turn: Turn = FIRST,
    inner_rate: float,
    inner_steps: int,
) -> Step:
    """Return the client's next state, by (1)-(3); its x and lam are the upload.

    The loss is the mean over the mini-batches of all its gradients.
    """
    steps, rate = oracle.steps, oracle.rate
    state = idle_steps(state, dual, turn.clock - state.clock)

    def step(w: Vector, done: Tally) -> tuple[Vector, Tally]:
        lam = state.lam
        return outer_step(w, z, oracle, done, lam=lam, inner_rate=inner_rate,
                          inner_steps=inner_steps, rate=rate)  # fmt: skip

    w, done = repeated(steps, step, z, Tally())
    solved = done.mean(w, done.steps, steps=steps, epochs=None)
    return uploaded(dual_step(state, w, z, dual, turn), solved)


class PerFedBC(ProximityStrategy):
    """Per-FedBC's server half; see the module's docstring for the rule.

    Of ``local``, (2) uses ``lr``, ``epochs``, ``random-epochs``, ``steps``, ``random-steps`` and
    ``batch-size``. Raises ``ValueError`` for settings that ask for other than plain gradient steps.
    """

    algorithm = "per-fedbc"
    client_half = ClientHalf(
        client_rule, State, first_state, own="x", reads=READS, check=check_own_steps
    )
    moves_received = True
    card = Card(
        "Per-FedBC",
        "FedBC with first-order meta-learning as local work",
        when="personalized models must adapt in one step, and clients keep state",
        keeps="model, five numbers",
        paper="Bedi et al., 2022",
        arxiv="2206.10815",
    )
    paper_rule: ClassVar[Mapping[str, Any]] = {
        "inner_rate": 0.01,
        "inner_steps": 1,
        "dual_momentum": 0.0,
    }
    paper_local: ClassVar[Mapping[str, Scalar]] = {"lr": 0.001}
    authors_rule: ClassVar[Mapping[str, Any]] = {**paper_rule, "dual_momentum": 0.5}
    authors_local: ClassVar[Mapping[str, Scalar]] = {"lr": 0.01}
    inner_rate: Schedule = number(
        default=0.01, about="a; the paper's by default.", low=0.0, scheduled=True, sent="inner-rate"
    )
    inner_steps: int = number(
        default=1, about="J; the paper's by default.", integer=True, low=1, sent="inner-steps"
    )

    def __post_init__(self) -> None:
        check_own_steps(self.algorithm, self.local)
        super().__post_init__()
        self.local = tuned_at(self.inner_rate, self.local)

    @classmethod
    def most_steps(cls, config: Mapping[str, Any], local: float, samples: int) -> float:
        return local * (1 + count_of(config, "inner-steps"))
