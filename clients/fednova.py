"""FedNova's client half; the rule is in ``fl_strategies.fednova``."""

from __future__ import annotations

from clients.base import FederatedClient
from clients.keeping import State
from clients.request import Config, Received, value_of
from fl_strategies import fednova
from fl_strategies.core.oracle import Oracle, Step


class FedNovaClient(FederatedClient):
    """Uploads its model, and the accumulated weight of its local steps; keeps nothing."""

    algorithm = "fednova"

    def step(self, state: State, received: Received, oracle: Oracle, config: Config) -> Step:
        training, mu = self.training.updated(config), value_of(config, "mu")
        fednova.check_steps(training.settings, mu)
        return fednova.client_rule(
            received.theta,
            oracle,
            rate=training.rate,
            mu=mu,
            momentum=training.momentum,
            nesterov=training.nesterov,
        )
