"""Per-FedBC: FedBC whose clients look for a model from which one step of their own goes far.

The local work is first-order model-agnostic meta-learning (MAML): each outer step takes the
gradient where a few inner steps on the penalised local problem end, and applies it where they
began. Round with the model z received, for each client i of S, on a fresh mini-batch for every
gradient g:

    w <- z;  K times:  u <- w;  J times:  u <- u - a (g(u) + 2 lambda (u - z))  (1)
                       w <- w - b g(u)                                          (2)
    x+ = w;  lambda+, gamma+ by the dual step of ``fl_strategies.proximity``    (3)
    z <- sum_{i in S} lambda+_i x+_i / sum_{i in S} lambda+_i                   (4)

K       outer steps: the ``steps`` or ``epochs`` of ``local``, where an epoch is as many outer steps
        as the client has mini-batches
b       outer rate: the ``lr`` of ``local`` (paper 0.001)
a, J    inner rate (paper 0.01) and inner steps (paper 1)

Kept by the client: x, lambda, gamma, as in FedBC. (2) has neither the penalty nor second
derivatives: with inner rate 0 and lambda fixed it is FedAvg with uniform weights.

Deviations of the authors' published code. There b is accepted but never used, (2) moves by a; set
``lr`` to ``inner_rate`` for its numbers. ``dual_momentum=0.5`` as in FedBC. It measures z after one
inner step on the client's TEST data: ``tuned-accuracy`` with ``fine-tune="test-batch"`` in
``local``, ``"train"`` for the same without looking at test data.

Reference: see ``fl_strategies.fedbc``; Algorithm 3, appendix E.4.
"""

from __future__ import annotations

from typing import Unpack

from fl_strategies.meta import Gradient, check_plain_steps, tune_at
from fl_strategies.proximity import (
    FIRST,
    Dual,
    DualOptions,
    ProximityStrategy,
    State,
    Turn,
    dual_step,
    idle_steps,
    per_client,
)
from fl_strategies.schedules import Knob, check
from fl_strategies.strategy import Knobs
from fl_strategies.subproblem import Vector


def outer_step(
    w: Vector,
    z: Vector,
    gradient: Gradient,
    *,
    lam: float,
    inner_rate: float,
    inner_steps: int,
    rate: float,
) -> Vector:
    """Return w after one outer step, by (1) and (2)."""
    u = w
    for _ in range(inner_steps):
        u = u - inner_rate * (gradient(u) + 2 * lam * (u - z))
    return w - rate * gradient(u)


def client_rule(
    state: State,
    z: Vector,
    gradient: Gradient,
    *,
    dual: Dual,
    turn: Turn = FIRST,
    steps: int,
    rate: float,
    inner_rate: float,
    inner_steps: int,
) -> State:
    """Return the client's next state, by (1)-(3); its x and lam are the upload."""
    state = idle_steps(state, dual, turn.clock - state.clock)
    lam, w = per_client(state.lam), z
    for _ in range(steps):
        w = outer_step(
            w, z, gradient, lam=lam, inner_rate=inner_rate, inner_steps=inner_steps, rate=rate
        )
    return dual_step(state, w, z, dual, turn)


class PerFedBC(ProximityStrategy):
    """Per-FedBC's server half; see the module's docstring for the rule.

    Parameters
    ----------
    inner_rate : float or {first round: float}, >= 0 (default 0.01, the paper's)
    inner_steps : int >= 1 (default 1, the paper's)
    **options
        alpha, alpha_gamma, gamma, lambda_min, lambda_max and dual_momentum of
        :class:`fl_strategies.proximity.ProximityStrategy`, and those of
        :class:`fl_strategies.FederatedStrategy`. Of ``local``, (2) knows ``lr``, ``epochs``,
        ``random-epochs``, ``steps``, ``random-steps`` and ``batch-size``.

    Raises
    ------
    ValueError
        For a knob outside its range, lambda_min > lambda_max, or a ``local`` that asks for another
        solver than plain gradient steps.
    """

    algorithm = "per-fedbc"

    def __init__(
        self, *, inner_rate: Knob = 0.01, inner_steps: int = 1, **options: Unpack[DualOptions]
    ) -> None:
        check("inner_rate", inner_rate, low=0.0, scheduled=True)
        check("inner_steps", inner_steps, low=1, integer=True)
        check_plain_steps(self.algorithm, options.get("local"))
        super().__init__(**options)
        self.inner_rate, self.inner_steps = inner_rate, inner_steps
        tune_at(inner_rate, self.local)

    def client_knobs(self) -> Knobs:
        return super().client_knobs() | {
            "inner-rate": self.inner_rate,
            "inner-steps": self.inner_steps,
        }
