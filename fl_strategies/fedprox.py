"""FedProx: FedAvg whose clients are pulled back to the common model.

    w_i   ~ argmin_w f_i(w) + (mu/2) ||w - theta||^2, started at theta          (1)
    theta <- sum_i p_i w_i / sum_i p_i                                          (2)

mu      pull, >= 0; mu = 0 is FedAvg
p_i     weight of client i: its number of training examples, or 1 ("uniform")

Clients keep nothing. mu travels as ``proximal-mu``, the key of Flower's own FedProx.

Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous
Networks", MLSys 2020, Algorithm 2.
"""

from __future__ import annotations

from typing import Unpack

from fl_strategies.fedavg import Averaging, Weights
from fl_strategies.schedules import Knob, check
from fl_strategies.strategy import Knobs, Options
from fl_strategies.subproblem import Solve, Subproblem, Vector


def client_rule(theta: Vector, solve: Solve, *, mu: float) -> Vector:
    """Return the client's upload w, by (1)."""
    return solve(theta, Subproblem(pull=mu, centre=theta))


class FedProx(Averaging):
    """FedProx's server half.

    Parameters
    ----------
    mu : float or {first round: float}, >= 0 (default 0.01)
    weights : "examples" or "uniform" (default "examples")
    **options
        Those of :class:`fl_strategies.FederatedStrategy`.
    """

    algorithm = "fedprox"

    def __init__(
        self, *, mu: Knob = 0.01, weights: Weights = "examples", **options: Unpack[Options]
    ) -> None:
        check("mu", mu, low=0.0, scheduled=True)
        super().__init__(weights=weights, **options)
        self.mu = mu

    def client_knobs(self) -> Knobs:
        return {"proximal-mu": self.mu}
