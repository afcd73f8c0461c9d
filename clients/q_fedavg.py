"""q-FedAvg's client half; the rule is in ``fl_strategies.q_fedavg``."""

from __future__ import annotations

from clients.base import FederatedClient
from clients.keeping import State
from clients.request import Config, Received
from fl_strategies import q_fedavg
from fl_strategies.core.oracle import Oracle, Step


class QFedAvgClient(FederatedClient):
    """Uploads its model as FedAvg's client does, and the received model's loss; keeps nothing."""

    algorithm = "q-fedavg"

    def step(self, state: State, received: Received, oracle: Oracle, config: Config) -> Step:
        rate = self.training.updated(config).rate
        return q_fedavg.client_rule(received.theta, oracle, rate=rate)
