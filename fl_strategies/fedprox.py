"""FedProx: FedAvg with a term that pulls clients back to the global model.

    w_i   ~ argmin_w f_i(w) + (mu/2) ||w - theta||^2, started at theta          (1)
    theta <- sum_i p_i w_i / sum_i p_i                                          (2)

mu      pull, >= 0; mu = 0 is FedAvg
p_i     weight of client i: its number of training samples, or 1 ("uniform")

Clients keep nothing. mu travels as ``proximal-mu``, the key of Flower's own FedProx.

Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous
Networks", MLSys 2020, Algorithm 2.
"""

from __future__ import annotations

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Schedule, number
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector
from fl_strategies.fedavg import Averaging
from fl_strategies.server.algorithm import Card


def client_rule(theta: Vector, oracle: Oracle, *, mu: float) -> Step:
    """Return the client's upload w, by (1)."""
    solved = oracle.solve(theta, Subproblem(pull=mu, centre=theta))
    return Step(solved.w, solved=solved)


class FedProx(Averaging):
    """FedProx's server half.

    Unlike Flower's class of this name: mu is 0.01 by default, not 0, and may be a schedule; one
    client is enough (``min_train_nodes`` ... are 1); replies are checked, and a reply that names no
    algorithm is used, with a warning.
    """

    algorithm = "fedprox"
    client_half = ClientHalf(client_rule)
    card = Card(
        "FedProx",
        "pulls local training towards the global model",
        when="data are non-IID and long local training diverges",
        keeps="nothing",
        paper="Li et al., MLSys 2020",
        arxiv="1812.06127",
    )
    unnamed = "to add (proximal-mu/2) ||w - theta||^2 to its loss"
    mu: Schedule = number(
        default=0.01,
        about="Pull towards the global model.",
        low=0.0,
        scheduled=True,
        sent="proximal-mu",
    )
    proximal_mu: Schedule | None = number(
        default=None,
        about="mu by the name that Flower's own class has for it.",
        low=0.0,
        scheduled=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.proximal_mu is not None:
            if self.mu not in (type(self).declarations["mu"].default, self.proximal_mu):
                raise ValueError(
                    f"mu and proximal_mu are one, got {self.mu!r} and {self.proximal_mu!r}"
                )
            self.mu = self.proximal_mu
