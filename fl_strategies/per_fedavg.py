"""Per-FedAvg: the common model is one that a single local gradient step makes good for a client.

The problem is  min_w (1/m) sum_i F_i(w)  with  F_i(w) = f_i(w - a grad f_i(w)): the loss of client
i's model after one step of its own. Clients descend on F_i (model-agnostic meta-learning, MAML),
the server averages. Round with theta, for each client i of S, on a fresh mini-batch b1, b2, b3 for
every derivative:

    w <- theta;  K times:  u = w - a g(w; b1)                                   (1)
                           w <- w - b (I - a H(w; b3)) g(u; b2)                 (2)
    theta <- sum_{i in S} p_i w_i / sum_{i in S} p_i                            (3)

K       outer steps (the paper's tau): the ``steps`` or ``epochs`` of ``local``, where an epoch is
        as many outer steps as the client has mini-batches
b       outer rate: the ``lr`` of ``local``
a       inner rate, also that of the step by which the model is adapted
g, H    gradient and Hessian of f_i; H is only ever multiplied with a vector
p_i     1 as published ("uniform"), or the client's number of training examples ("examples")

Clients keep nothing. A client's own model is theta after one step (1): evaluation reports it as
``tuned-accuracy``, with the step on a mini-batch of training data and of rate a unless ``local``
sets ``fine-tune`` or ``fine-tune-lr``.

Facts. On full batches (2) is gradient descent on F_i. The first-order form leaves a H out: its
direction is off by -a H g(u), so that clients that differ agree on another point. With inner rate
0 both are FedAvg.

Deviation: the paper's Hessian-free form has a central difference of two gradients in place of H v,
with a step to choose; here H v is exact, by differentiating the gradient, at about the same price.

Reference: Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees:
A Model-Agnostic Meta-Learning Approach", NeurIPS 2020, Algorithm 1.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, Unpack

from fl_strategies.fedavg import Averaging, Weights
from fl_strategies.meta import Gradient, HessianProduct, check_plain_steps, tune_at
from fl_strategies.schedules import Knob, check, one_of
from fl_strategies.strategy import Knobs, Options
from fl_strategies.subproblem import Vector

MetaGradient: TypeAlias = Literal["exact", "first-order"]


def outer_step(
    w: Vector,
    gradient: Gradient,
    product: HessianProduct | None,
    *,
    rate: float,
    inner_rate: float,
) -> Vector:
    """Return w after (1) and (2); without ``product`` the first-order form."""
    g = gradient(w - inner_rate * gradient(w))
    if product is not None:
        g = g - inner_rate * product(w, g)
    return w - rate * g


def client_rule(
    theta: Vector,
    gradient: Gradient,
    product: HessianProduct | None = None,
    *,
    steps: int,
    rate: float,
    inner_rate: float,
) -> Vector:
    """Return the client's upload w, by ``steps`` times (1) and (2) from theta."""
    w = theta
    for _ in range(steps):
        w = outer_step(w, gradient, product, rate=rate, inner_rate=inner_rate)
    return w


class PerFedAvg(Averaging):
    """Per-FedAvg's server half; see the module's docstring for the rule.

    Parameters
    ----------
    inner_rate : float or {first round: float}, >= 0 (default 0.01)
    meta_gradient : "exact" or "first-order" (default "exact")
        Whether (2) has its Hessian. "exact" needs a model that can be differentiated twice, and
        takes about twice the time of "first-order".
    weights : "uniform" or "examples" (default "uniform")
    **options
        Those of :class:`fl_strategies.FederatedStrategy`. Of ``local``, (2) knows ``lr``,
        ``epochs``, ``random-epochs``, ``steps``, ``random-steps`` and ``batch-size``.

    Raises
    ------
    ValueError
        For a knob outside its range, or a ``local`` that asks for another solver than plain
        gradient steps.
    """

    algorithm = "per-fedavg"

    def __init__(
        self,
        *,
        inner_rate: Knob = 0.01,
        meta_gradient: MetaGradient = "exact",
        weights: Weights = "uniform",
        **options: Unpack[Options],
    ) -> None:
        check("inner_rate", inner_rate, low=0.0, scheduled=True)
        one_of("meta_gradient", meta_gradient, ("exact", "first-order"))
        check_plain_steps(self.algorithm, options.get("local"))
        super().__init__(weights=weights, **options)
        self.inner_rate, self.meta_gradient = inner_rate, meta_gradient
        self.local.setdefault("fine-tune", "train")
        tune_at(inner_rate, self.local)

    def client_knobs(self) -> Knobs:
        return {"inner-rate": self.inner_rate, "meta-gradient": self.meta_gradient}
