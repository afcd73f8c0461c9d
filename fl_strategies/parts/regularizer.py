"""Regularizer: a penalty g on the global model, added to the clients' mean loss.

    min_theta  (1/m) sum_i f_i(theta) + g(theta)                                (1)
    theta <- argmin_v  g(v) + (1/(2 c)) ||v - aggregated||^2                    (2)
    L1     g = weight ||theta||_1      v = sign(a) max(|a| - c weight, 0)       (3)
    L2     g = (weight/2) ||theta||^2  v = a / (1 + c weight)                   (4)
    box    g = 0 in [low, high]^d      v = min(max(a, low), high)               (5)

a  aggregated, the next model [d] of the algorithm's server rule
c  the algorithm's own: 1/rho of FedADMM with ``eta="fraction"`` and of A-FedPD, 1/alpha of FedDyn,
   eta of FedPD with p = 0, the learning rate of FedSGD

Clients know nothing of g: the server takes the proximal step (2) on what the rule aggregated. In
the algorithms above that is a step of their own method for (1): the theta-step of consensus ADMM,
which minimises g(theta) + (1/m) sum_i (rho/2) ||theta - (w_i + y_i/rho)||^2, and for FedSGD the
proximal gradient method. Where they converge without g they converge to the point of (1), whoever
takes part (FedSGD: all clients; its sums are weighted by samples). Other rules have no such c, and
are refused. By (3) many numbers of the model are exactly 0; with a server step, which moves from
theta towards (2), they only tend to 0, and numbers can leave the box. Only trained arrays have a
penalty.

Reference: Wang, Marella, Anderson, "FedADMM: A Federated Primal-Dual Algorithm Allowing Partial
Participation", arXiv 2203.15104; Parikh, Boyd, "Proximal Algorithms", 2014, Sections 4 to 7.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fl_strategies.core.hyperparameters import number
from fl_strategies.core.vectors import Vector
from fl_strategies.parts.part import Need, Part

PROXIMAL = Need(
    lambda rule: rule.proximal_rate(1) is not None,
    "a proximal step must follow a step on the clients' mean loss, and the global step of {rule} is"
    " not such a step",
    'FedADMM with eta="fraction", FedDyn, A-FedPD, FedPD with p = 0, or FedSGD with an lr in local;'
    " or a penalty in the clients' own loss (`weight-decay` of `local`)",
)


class Regularizer(Part):
    """Base of the penalties."""

    stage = "regularizer"
    paper = "Parikh, Boyd, 2014"
    needs: ClassVar[tuple[Need, ...]] = (PROXIMAL,)

    def prox(self, a: Vector, rate: float) -> Vector:
        """Return the model of (2), with ``rate`` = c."""
        raise NotImplementedError


class L1(Regularizer):
    """(3); see the module's docstring."""

    name = "l1"
    about = "weight times the sum of absolute values: sparse models"
    weight: float = number(default=1e-3, about="Weight of the penalty.", low=0.0)

    def prox(self, a: Vector, rate: float) -> Vector:
        return np.sign(a) * np.maximum(np.abs(a) - rate * self.weight, 0.0)


class L2(Regularizer):
    """(4); see the module's docstring."""

    name = "l2"
    about = "weight/2 times the squared norm"
    weight: float = number(default=1e-3, about="Weight of the penalty.", low=0.0)

    def prox(self, a: Vector, rate: float) -> Vector:
        return a / (1.0 + rate * self.weight)


class Box(Regularizer):
    """(5); see the module's docstring. Raises ``ValueError`` for low > high."""

    name = "box"
    about = "every number within bounds"
    low: float = number(default=-1.0, about="Lower bound.")
    high: float = number(default=1.0, about="Upper bound.")

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low must be <= high ({self.high:g}), got {self.low:g}")

    def prox(self, a: Vector, rate: float) -> Vector:
        return np.clip(a, self.low, self.high)
