"""Per-FedAvg's client half; the rule is in ``fl_strategies.per_fedavg``."""

from __future__ import annotations

from clients.base import FederatedClient
from clients.keeping import State
from clients.request import Config, Received, value_of
from fl_strategies import per_fedavg
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.solvers.own_steps import check_own_steps


class PerFedAvgClient(FederatedClient):
    """Uploads its model, trained so that one gradient step personalizes it; keeps nothing.

    ``train-loss`` is the mean over the mini-batches of all its gradients.
    """

    algorithm = "per-fedavg"

    def step(self, state: State, received: Received, oracle: Oracle, config: Config) -> Step:
        training = self.training.updated(config)
        check_own_steps(self.algorithm, training.settings)
        return per_fedavg.client_rule(
            received.theta,
            oracle,
            steps=oracle.steps,
            rate=training.rate,
            inner_rate=value_of(config, "inner-rate"),
            meta_gradient=value_of(config, "meta-gradient"),
        )
