"""FedAvg's client half; the rule is in ``fl_strategies.fedavg``."""

from __future__ import annotations

from clients.base import FederatedClient
from clients.keeping import State
from clients.request import Config, Received
from fl_strategies import fedavg
from fl_strategies.core.oracle import Oracle, Step


class FedAvgClient(FederatedClient):
    """Uploads the model that it trained from the received one; keeps nothing."""

    algorithm = "fedavg"

    def step(self, state: State, received: Received, oracle: Oracle, config: Config) -> Step:
        return fedavg.client_rule(received.theta, oracle)
