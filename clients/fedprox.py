"""FedProx's client half; the rule is in ``fl_strategies.fedprox``."""

from __future__ import annotations

from clients.base import FederatedClient
from clients.keeping import State
from clients.request import Config, Received, value_of
from fl_strategies import fedprox
from fl_strategies.core.oracle import Oracle, Step


class FedProxClient(FederatedClient):
    """Uploads the model that it trained near the received one; keeps nothing."""

    algorithm = "fedprox"

    def step(self, state: State, received: Received, oracle: Oracle, config: Config) -> Step:
        return fedprox.client_rule(received.theta, oracle, mu=value_of(config, "proximal-mu"))
