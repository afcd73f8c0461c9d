"""q-FedAvg: clients with a higher loss get a larger weight.

Minimises sum_i F_i^(q+1)/(q+1) over the clients' losses F_i, which for q = 0 is their mean and for
larger q more and more their maximum. Round with theta, for each client i of S:

    w_i    ~ argmin_w f_i(w), by a few epochs of a solver started at theta      (1)
    Delta  = (theta - w_i)/lr                                                   (2)
    h      = q F^(q-1) ||Delta||^2 + F^q/lr                                     (3)
    theta <- theta - sum_i F_i^q Delta_i / sum_i h_i                            (4)

F_i    loss of theta on all training samples of client i, >= 0, in evaluation mode; reported by the
       client as ``global-loss``, before it trains
lr     the client's learning rate, reported by it as ``lr``; 1/lr stands for the Lipschitz constant
       of the gradient, from which (3) bounds that of F^(q+1)/(q+1)
q      fairness, >= 0; with q = 0 and one rate for all, (4) is FedAvg's mean with uniform weights

Clients keep nothing. F + 1e-10 stands for F in (3) and (4), as in the authors' code and in Flower's
own QFedAvg: F = 0 has no power q - 1. Beyond q = 30 its power would be 0, and (4) no number.

Deviation from the paper, whose Algorithm 2 asks client i with probability p_i, its share of all
samples, and minimises sum_i p_i F_i^(q+1)/(q+1): clients are asked uniformly, so all count equally,
for any numbers of samples.

(4) needs only sum_i F_i^q w_i/lr_i, and each F_i, lr_i and ||theta - w_i||^2. So a host may send
the mean of its w_i with the weights F_i^q/lr_i, and the distances.

Reference: Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020,
Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fl_strategies import fedavg
from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import Schedule, number
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.schedules import at, values
from fl_strategies.core.vectors import Number, Vector
from fl_strategies.server.algorithm import Card, Next, State
from fl_strategies.server.strategy import FederatedStrategy

LOSS, RATE = "global-loss", "lr"
EPSILON = 1e-10
STEEPEST = 30.0
"""The largest q: EPSILON^q, the weight of a loss of 0, is still a number."""


def client_rule(theta: Vector, oracle: Oracle) -> Step:
    """Return the client's upload w, by (1), and F and lr, which are sent with it."""
    scalars = {LOSS: oracle.loss(theta), RATE: oracle.rate}
    return fedavg.client_rule(theta, oracle)._replace(scalars=scalars)


def fairness_weight(loss: Number, q: float) -> Number:
    """Return F^q."""
    return (loss + EPSILON) ** q


class Local(NamedTuple):
    """w_i or its host's mean, F_i, lr, and ||theta - w_i||^2 where ``w`` is not w_i."""

    w: Vector
    loss: Number
    lr: Number
    distance2: float | None = None


def server_rule(theta: Vector, uploads: Iterable[Local], *, q: float) -> Vector:
    """Return the next model, by (2)-(4), from each client's upload."""
    moved: Vector = 0.0
    bound = 0.0
    for w, loss, lr, distance2 in uploads:
        weight, delta = fairness_weight(loss, q), (theta - w) / lr
        squared = float(delta @ delta) if distance2 is None else distance2 / lr**2
        moved = moved + weight * delta
        bound += q * fairness_weight(loss, q - 1.0) * squared + weight / lr
    return theta - moved / bound


def weight(upload: Upload, *, q: float) -> float:
    """Return F^q / lr, the weight of w_i in (4)."""
    return float(fairness_weight(upload.scalars[LOSS], q) / upload.scalars[RATE])


class QFedAvg(FederatedStrategy):
    """q-FedAvg's server half; see the module's docstring for the rule and every symbol.

    Unlike Flower's class of this name: q is 1 by default, not 0.1, and may be a schedule; each
    client reports its learning rate and the loss of the model received (``lr``, ``global-loss``),
    where Flower's has ``client_learning_rate`` and its clients' ``train_loss``.
    """

    algorithm = "q-fedavg"
    client_half = ClientHalf(client_rule)
    folds = folds_distances = True
    moves_received = True
    weight = staticmethod(weight)
    card = Card(
        "q-FedAvg",
        "gives clients with a higher loss a larger weight",
        when="the clients with the worst accuracy matter most",
        keeps="nothing",
        paper="Li et al., ICLR 2020",
        arxiv="1905.10497",
    )
    q: Schedule = number(
        default=1.0,
        about="Fairness; 0 is FedAvg's uniform mean.",
        low=0.0,
        high=STEEPEST,
        scheduled=True,
    )

    @property
    def scalar_bounds(self) -> Mapping[str, tuple[float, float]]:
        # F^q of an absurd loss is not finite
        steepest = max(1.0, *values(self.q))
        largest = 10.0 ** min(12.0, 100.0 / steepest)
        return {LOSS: (0.0, largest), RATE: (1e-12, 1e12)}

    def aggregate(self, state: State, round: Round, uploads: Sequence[Upload]) -> Next:
        local = (
            Local(up.vector, up.scalars[LOSS], up.scalars[RATE], up.distance2) for up in uploads
        )
        return server_rule(round.theta, local, q=at(self.q, round.number)), state, {}
