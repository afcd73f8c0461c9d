"""FedSGD: one gradient step a round, on all examples of the clients that take part.

    w_i   = theta - lr grad f_i(theta)                                          (1)
    theta <- sum_i n_i w_i / sum_i n_i                                          (2)

f_i     mean loss of client i over all of its n_i examples
lr      the clients' learning rate (``local={"lr": ...}``, which may be a schedule)

This is FedAvg with the solver ``gd`` and one epoch, and by (2) one step of gradient descent on the
mean loss of all examples of S, the clients of the round: with all clients in S, centralised
gradient descent. The paper has clients send grad f_i and the server take the step; w_i says the
same. A model with dropout or BatchNorm draws its masks, and takes its batch statistics, per client.

Clients keep nothing. Weight decay is allowed, as it is a term of f_i; so is what only measures.

Reference: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, Section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Unpack

from fl_strategies.fedavg import server_rule
from fl_strategies.schedules import all_among
from fl_strategies.strategy import FederatedStrategy, Knobs, Options, Scalar, Upload
from fl_strategies.subproblem import Vector

ONE_STEP: Mapping[str, tuple[Scalar, ...]] = {
    "solver": ("gd",),
    "epochs": (1,),
    "steps": (0, 1),
    "solver-params": ("",),
    "momentum": (0.0,),
    "nesterov": (False,),
    "extrapolation": (0.0,),
    "box": (0.0,),
}
"""Local settings that make (1), the first of each of which clients are sent."""


class FedSGD(FederatedStrategy):
    """FedSGD's server half.

    Takes the arguments of :class:`fl_strategies.FederatedStrategy`.

    Raises
    ------
    ValueError
        For a local setting that makes local training anything else than (1).
    """

    algorithm = "fedsgd"
    averages = "models"

    def __init__(self, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        all_among(self.local, ONE_STEP, "FedSGD takes one gradient step on all examples")

    def client_knobs(self) -> Knobs:
        return {name: values[0] for name, values in ONE_STEP.items()}

    def weight(self, upload: Upload) -> float:
        return upload.num_examples

    def aggregate(
        self, server_round: int, theta: Vector, uploads: Iterable[Upload], used: int
    ) -> Vector:
        return server_rule(uploads, weights="examples")
