"""q-FedAvg: clients that are served worse count for more.

Minimises sum_i F_i^(q+1)/(q+1) over the clients' losses F_i, which for q = 0 is their mean and for
larger q more and more their maximum. Round with theta, for each client i of S:

    w_i    ~ argmin_w f_i(w), by a few epochs of a solver started at theta      (1)
    Delta  = (theta - w_i)/lr                                                   (2)
    h      = q F^(q-1) ||Delta||^2 + F^q/lr                                     (3)
    theta <- theta - sum_i F_i^q Delta_i / sum_i h_i                            (4)

F_i    loss of theta on all training examples of client i, >= 0, in evaluation mode; reported by the
       client as ``global-loss``, before it trains
lr     the client's learning rate, reported by it as ``lr``; 1/lr stands for the Lipschitz constant
       of the gradient, from which (3) bounds that of F^(q+1)/(q+1)
q      fairness, >= 0; with q = 0 and one rate for all, (4) is FedAvg's mean with uniform weights

Clients keep nothing. F + 1e-10 stands for F in (3) and (4), as in the authors' code and in Flower's
own QFedAvg: F = 0 has no power q - 1. Clients all count alike, whatever their number of examples.

Reference: Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020,
Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from fl_strategies.schedules import Knob, at, check, values
from fl_strategies.strategy import FederatedStrategy, Options, Upload
from fl_strategies.subproblem import Vector

LOSS, RATE = "global-loss", "lr"
EPSILON = 1e-10


def fairness_weight(loss: float, q: float) -> float:
    """Return F^q."""
    return float((loss + EPSILON) ** q)


def server_rule(
    theta: Vector, uploads: Iterable[tuple[Vector, float, float]], *, q: float
) -> Vector:
    """Return the next model, by (2)-(4), from each client's (w_i, F_i, lr)."""
    moved: Vector = 0.0
    bound = 0.0
    for w, loss, lr in uploads:
        weight, delta = fairness_weight(loss, q), (theta - w) / lr
        moved = moved + weight * delta
        bound += q * fairness_weight(loss, q - 1.0) * float(delta @ delta) + weight / lr
    return theta - moved / bound


class QFedAvg(FederatedStrategy):
    """q-FedAvg's server half; see the module's docstring for the rule and every symbol.

    Parameters
    ----------
    q : float or {first round: float}, >= 0 (default 1.0)
    **options
        Those of :class:`fl_strategies.FederatedStrategy`.

    Raises
    ------
    ValueError
        If q is outside its range.
    """

    algorithm = "q-fedavg"

    def __init__(self, *, q: Knob = 1.0, **options: Unpack[Options]) -> None:
        check("q", q, low=0.0, scheduled=True)
        super().__init__(**options)
        self.q = q
        # F^q of an absurd loss is no number
        steepest = max(1.0, *values(q))
        largest = 10.0 ** min(12.0, 100.0 / steepest)
        self.scalar_bounds = {LOSS: (0.0, largest), RATE: (1e-12, 1e12)}

    def weight(self, upload: Upload) -> float:
        number = self._rounds_before + self._round
        return fairness_weight(upload.scalars[LOSS], at(self.q, number))

    def aggregate(
        self, server_round: int, theta: Vector, uploads: Iterable[Upload], used: int
    ) -> Vector:
        found = ((up.vector, up.scalars[LOSS], up.scalars[RATE]) for up in uploads)
        return server_rule(theta, found, q=at(self.q, server_round))
