"""Per-FedAvg: a global model that a single local gradient step adapts to a client.

The problem is  min_w (1/m) sum_i F_i(w)  with  F_i(w) = f_i(w - a grad f_i(w)): the loss of client
i after one local gradient step. Clients descend on F_i (model-agnostic meta-learning, MAML), and
the server averages. Round with theta, for each client i of S, on a fresh mini-batch b1, b2, b3 for
every derivative:

    w <- theta;  K times:  u = w - a g(w; b1)                                   (1)
                           w <- w - b (I - a H(w; b3)) g(u; b2)                 (2)
    theta <- sum_{i in S} p_i w_i / sum_{i in S} p_i                            (3)

K       outer steps (the paper's tau): the ``steps`` or ``epochs`` of ``local``, where an epoch is
        as many outer steps as the client has mini-batches
b       outer rate: the ``lr`` of ``local``
a       inner rate, also of the step that personalizes the model
g, H    gradient and Hessian of f_i; only products of H and a vector are computed
p_i     1 as published ("uniform"), or the client's number of training samples ("samples")

Clients keep nothing. A client's personalized model is theta after one step (1): evaluation reports
it as ``tuned-accuracy``, with the step on a mini-batch of training data and of rate a unless
``local`` sets ``fine-tune`` or ``fine-tune-lr``.

Facts. On full batches (2) is gradient descent on F_i. The first-order form leaves a H out: its
direction is off by -a H g(u), so that on heterogeneous clients its fixed point is another one. With
inner rate 0 both forms are FedAvg.

Deviation: the paper's Hessian-free form has a central difference of two gradients in place of H v,
with a step to choose; here H v is exact, by differentiating the gradient, at about the same price.

Reference: Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees:
A Model-Agnostic Meta-Learning Approach", NeurIPS 2020, Algorithm 1.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Schedule, choice, number
from fl_strategies.core.oracle import Oracle, Step, Tally
from fl_strategies.core.stacks import repeated
from fl_strategies.core.vectors import Vector
from fl_strategies.fedavg import Averaging, Weights
from fl_strategies.server.algorithm import Card
from fl_strategies.solvers.own_steps import check_own_steps, tuned_at

MetaGradient: TypeAlias = Literal["exact", "first-order"]


def client_rule(
    theta: Vector,
    oracle: Oracle,
    *,
    inner_rate: float,
    meta_gradient: MetaGradient = "exact",
) -> Step:
    """Return the client's upload w, by ``oracle.steps`` = K times (1) and (2) from theta.

    The loss is the mean over the mini-batches of all its gradients.
    """
    steps, rate = oracle.steps, oracle.rate

    def outer_step(w: Vector, done: Tally) -> tuple[Vector, Tally]:
        here = oracle.gradient(w)
        there = oracle.gradient(w - inner_rate * here.vector)
        g = there.vector
        if meta_gradient == "exact":
            g = g - inner_rate * oracle.hessian_product(w, g)
        return w - rate * g, done.plus(here).plus(there)

    w, done = repeated(steps, outer_step, theta, Tally())
    return Step(w, solved=done.mean(w, 2 * steps, steps=steps, epochs=None))


class PerFedAvg(Averaging):
    """Per-FedAvg's server half; see the module's docstring for the rule.

    Of ``local``, (2) uses ``lr``, ``epochs``, ``random-epochs``, ``steps``, ``random-steps`` and
    ``batch-size``. Raises ``ValueError`` for settings that ask for other than plain gradient steps.
    """

    algorithm = "per-fedavg"
    client_half = ClientHalf(client_rule, check=check_own_steps)
    card = Card(
        "Per-FedAvg",
        "a global model that one local gradient step personalizes",
        when="new clients need a personalized model, and clients keep nothing",
        keeps="nothing",
        paper="Fallah, Mokhtari, Ozdaglar, NeurIPS 2020",
        arxiv="2002.07948",
    )
    inner_rate: Schedule = number(
        default=0.01, about="a.", low=0.0, scheduled=True, sent="inner-rate"
    )
    meta_gradient: MetaGradient = choice(
        default="exact",
        choices=("exact", "first-order"),
        about='Whether (2) has its Hessian. "exact" needs a model that can be differentiated'
        ' twice, and takes about twice the time of "first-order".',
        sent="meta-gradient",
    )
    weights: Weights = choice(
        default="uniform",
        choices=("samples", "uniform"),
        about="Whether p_i is the number of samples, or 1.",
    )

    def __post_init__(self) -> None:
        check_own_steps(self.algorithm, self.local)
        super().__post_init__()
        self.local = tuned_at(self.inner_rate, {"fine-tune": "train", **self.local})
