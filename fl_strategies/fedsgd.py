"""FedSGD: one gradient step a round, on all samples of the clients that take part.

    w_i   = theta - lr grad f_i(theta)                                          (1)
    theta <- sum_i n_i w_i / sum_i n_i                                          (2)

f_i     mean loss of client i over all of its n_i samples
lr      the clients' learning rate (``local={"lr": ...}``, which may be a schedule)

This is FedAvg with the solver ``gd`` and one epoch, and by (2) one step of gradient descent on the
mean loss of all samples of S, the clients of the round: with all clients in S, centralised
gradient descent. The paper has clients send grad f_i and the server take the step; w_i says the
same. A model with dropout or BatchNorm draws its masks, and takes its batch statistics, per client.

Clients keep nothing. Weight decay is allowed, as it is a term of f_i; so is what only measures.

Reference: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, Section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fl_strategies.core.hyperparameters import Scalar
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.schedules import at
from fl_strategies.fedavg import Weights, server_rule, weight
from fl_strategies.server.algorithm import Card, Next, State
from fl_strategies.server.strategy import FederatedStrategy
from fl_strategies.solvers.own_steps import PLAIN, check_plain_steps

ONE_STEP: Mapping[str, Sequence[Scalar]] = {
    **PLAIN,
    "solver": ("gd",),
    "epochs": (1,),
    "random-epochs": (False,),
    "steps": (0, 1),
    "random-steps": (False,),
    "variance-reduction": ("off",),
}
"""Local settings that make (1), the first of each of which clients are sent."""


class FedSGD(FederatedStrategy):
    """FedSGD's server half.

    Raises ``ValueError`` for a local setting that makes local training anything else than (1).
    """

    algorithm = "fedsgd"
    card = Card(
        "FedSGD",
        "one gradient step on all of a client's samples",
        when="a baseline is wanted that equals centralized gradient descent",
        keeps="nothing",
        paper="McMahan et al., AISTATS 2017",
        arxiv="1602.05629",
    )
    runs = "fedavg"
    averages = "models"
    folds = weighs = True
    weight = staticmethod(weight)
    weights: Weights = "samples"

    def __post_init__(self) -> None:
        check_plain_steps(self.local, "FedSGD takes one gradient step on all samples", ONE_STEP)
        super().__post_init__()

    def proximal_rate(self, server_round: int) -> float | None:
        rate: Any = self.local.get("lr")
        return None if rate is None else at(rate, server_round)

    def client_config(self, state: State, round: Round, client: int) -> Mapping[str, Scalar]:
        return {name: values[0] for name, values in ONE_STEP.items()}

    def aggregate(self, state: State, round: Round, uploads: Sequence[Upload]) -> Next:
        return server_rule(self.weighted(round, uploads), mean=round.mean), state, {}
