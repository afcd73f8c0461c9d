"""FedAvg: clients train from the common model, the server averages.

    w_i   ~ argmin_w f_i(w), by a few epochs of a solver started at theta       (1)
    theta <- sum_i p_i w_i / sum_i p_i                                          (2)

p_i     weight of client i: its number of training examples, or 1 ("uniform")

Clients keep nothing.

Reference: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias, Unpack

from fl_strategies.composition import Averages
from fl_strategies.schedules import one_of
from fl_strategies.strategy import FederatedStrategy, Options, Upload
from fl_strategies.subproblem import Solve, Subproblem, Vector, weighted_mean

Weights: TypeAlias = Literal["examples", "uniform"]


def client_rule(theta: Vector, solve: Solve) -> Vector:
    """Return the client's upload w, by (1)."""
    return solve(theta, Subproblem())


def server_rule(uploads: Iterable[Upload], *, weights: Weights) -> Vector:
    """Return the mean of the uploads, by (2)."""
    by_size = weights == "examples"
    return weighted_mean((up.vector, up.num_examples if by_size else 1.0) for up in uploads)


class Averaging(FederatedStrategy):
    """Base of the strategies whose server does (2)."""

    averages: Averages = "models"

    def __init__(self, *, weights: Weights = "examples", **options: Unpack[Options]) -> None:
        one_of("weights", weights, ("examples", "uniform"))
        super().__init__(**options)
        self.weights = weights

    def weight(self, upload: Upload) -> float:
        return upload.num_examples if self.weights == "examples" else 1.0

    def aggregate(
        self, server_round: int, theta: Vector, uploads: Iterable[Upload], used: int
    ) -> Vector:
        return server_rule(uploads, weights=self.weights)


class FedAvg(Averaging):
    """FedAvg's server half.

    Parameters
    ----------
    weights : "examples" or "uniform" (default "examples")
    **options
        Those of :class:`fl_strategies.FederatedStrategy`.
    """

    algorithm = "fedavg"
