"""FedAvg: clients train from the global model, the server averages.

    w_i   ~ argmin_w f_i(w), by a few epochs of a solver started at theta       (1)
    theta <- sum_i p_i w_i / sum_i p_i                                          (2)

p_i     weight of client i: its number of training samples, or 1 ("uniform")

Clients keep nothing.

Facts. With one gradient step on the full batch this is FedSGD. With more local steps, on
heterogeneous data, clients drift towards their own minimisers, and the model stops near the
minimiser of the mean loss. With "uniform" weights the mean loss counts each client once, else each
sample. Nothing deviates from the paper.

Reference: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import choice
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.records import Mean, Round, Upload
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector, weighted_mean
from fl_strategies.messages.identity import FREE
from fl_strategies.server.algorithm import Card, Next, State
from fl_strategies.server.strategy import FederatedStrategy

Weights: TypeAlias = Literal["samples", "uniform"]


def client_rule(theta: Vector, oracle: Oracle) -> Step:
    """Return the client's upload w, by (1)."""
    solved = oracle.solve(theta, Subproblem())
    return Step(solved.w, solved=solved)


def weight(upload: Upload, *, weights: Weights) -> float:
    """Return p_i."""
    return upload.num_examples if weights == "samples" else 1.0


def server_rule(uploads: Iterable[tuple[Vector, float]], *, mean: Mean = weighted_mean) -> Vector:
    """Return the mean of the pairs (w_i, p_i), by (2)."""
    return mean(uploads)


class Averaging(FederatedStrategy):
    """Base of the strategies whose server does (2)."""

    averages = "models"
    folds = weighs = True
    weight = staticmethod(weight)
    weights: Weights = choice(
        default="samples",
        choices=("samples", "uniform"),
        about="Whether p_i is the number of samples, or 1.",
    )

    @property
    def equal_weights(self) -> bool:
        return type(self).weight is weight and self.weights == "uniform"

    def aggregate(self, state: State, round: Round, uploads: Sequence[Upload]) -> Next:
        return server_rule(self.weighted(round, uploads), mean=round.mean), state, {}


class FedAvg(Averaging):
    """FedAvg's server half.

    Unlike Flower's class of this name: one client is enough (``min_train_nodes`` ... are 1,
    there 2), a seed fixes who is sampled, sums are in float64, replies are checked, and a round in
    which none can be used is skipped. Any client will do, Flower's own ``@app.train`` included.
    """

    algorithm = "fedavg"
    client_half = ClientHalf(client_rule)
    card = Card(
        "FedAvg",
        "averages the clients' models",
        when="first: the baseline to tune and to beat",
        keeps="nothing",
        paper="McMahan et al., AISTATS 2017",
        arxiv="1602.05629",
    )
    unnamed = FREE
