"""FedNova: clients with more local steps get no larger weight.

If clients take different numbers of local steps, FedAvg does not minimise the mean of the losses
by samples: clients with more steps get more weight. FedNova divides each client's change by the
accumulated weight of its steps. Round with theta, for each client i of S:

    w_i    = theta after tau_i steps of gradient descent, with momentum or a pull    (1)
    a_i    = the sum of the weights with which (1) adds its gradients                (2)
    theta <- theta - (sum_i p_i a_i) sum_i p_i (theta - w_i)/a_i                     (3)

p_i     n_i / sum_{j in S} n_j, with n_i the samples of client i
a_i     "normalizer", reported by the client: of plain steps tau_i; with momentum mu_m
        sum_{j=1..tau_i} (1 - mu_m^j)/(1 - mu_m), with Nesterov's mu_m^(j+1) in place of mu_m^j;
        with the pull mu sum_{k=0..tau_i-1} (1 - lr mu)^k; in general by
        ``fl_strategies.solvers.gradient_weights``
mu      pull of local steps towards theta, as in FedProx, >= 0

Clients keep nothing. With equal a_i (3) is FedAvg by samples. Where they differ, and as lr -> 0,
theta converges to the minimiser of the mean loss by samples, which FedAvg does not.

(2) is known for ``sgd`` and ``gd`` alone; other solvers, extrapolation and a box are refused.
``clipping_norm`` also bounds the change of the global model, because a false a would scale the
changes of all clients.

Reference: Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization", NeurIPS 2020, eq. 13 and Section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.clipping import clip
from fl_strategies.core.hyperparameters import Schedule, number
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.stacks import is_nought
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector, weighted_sum
from fl_strategies.server.algorithm import Card, Next, State
from fl_strategies.server.strategy import FederatedStrategy
from fl_strategies.solvers.gradient_weights import check_weights_known

NORMALIZER = "normalizer"


def client_rule(theta: Vector, oracle: Oracle, *, mu: float = 0.0) -> Step:
    """Return the client's upload w by (1) and, as a scalar, a by (2)."""
    subproblem = Subproblem() if is_nought(mu) else Subproblem(pull=mu, centre=theta)
    solved = oracle.solve(theta, subproblem, rates=True)
    if isinstance(solved.weight, float) and math.isnan(solved.weight):
        raise ValueError(
            "fednova needs one sum of weights for all parameters, and those of the training loop"
            " differ: its optimizers have other rates, momenta, schedules or numbers of steps"
        )
    return Step(solved.w, scalars={NORMALIZER: solved.weight}, solved=solved)


def server_rule(theta: Vector, uploads: Iterable[tuple[Vector, float, float]]) -> Vector:
    """Return the next model by (3), from each client's (w_i, n_i, a_i)."""
    triples = list(uploads)
    samples = sum(n for _, n, _ in triples)
    tau = sum(n / samples * a for _, n, a in triples)
    moved, weight = weighted_sum((w, n / samples / a) for w, n, a in triples)
    return theta - tau * (weight * theta - moved)


def weight(upload: Upload) -> float:
    """Return n_i / a_i."""
    return upload.num_examples / upload.scalars[NORMALIZER]


class FedNova(FederatedStrategy):
    """FedNova's server half; see the module's docstring for the rule and every symbol.

    Raises ``ValueError`` for a ``local`` of other steps than (1).
    """

    algorithm = "fednova"
    client_half = ClientHalf(client_rule)
    folds = True
    moves_received = True
    weight = staticmethod(weight)
    card = Card(
        "FedNova",
        "divides each client's change by its number of local steps",
        when="clients take unequal numbers of local steps",
        keeps="nothing",
        paper="Wang et al., NeurIPS 2020",
        arxiv="2007.07481",
    )
    mu: Schedule = number(
        default=0.0,
        about="Pull of local steps towards the global model.",
        low=0.0,
        scheduled=True,
        sent="mu",
    )

    def __post_init__(self) -> None:
        check_weights_known(self.local, "FedNova needs to know what its steps add up to")
        super().__post_init__()

    @property
    def scalar_bounds(self) -> Mapping[str, tuple[float, float]]:
        return {NORMALIZER: (1e-12, 2.0**53)}

    def aggregate(self, state: State, round: Round, uploads: Sequence[Upload]) -> Next:
        theta = round.theta
        triples = ((up.vector, up.num_examples, up.scalars[NORMALIZER]) for up in uploads)
        model = server_rule(theta, triples)
        if self.clipping_norm is not None:  # a client's a scales the changes of all
            model = theta + clip(model - theta, self.clipping_norm)
        return model, state, {}
