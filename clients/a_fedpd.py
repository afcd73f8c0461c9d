"""A-FedPD's client half; the rule is in ``fl_strategies.a_fedpd``."""

from __future__ import annotations

from torch import Tensor

from clients.base import FederatedClient
from clients.request import Config, Received, value_of
from fl_strategies import a_fedpd
from fl_strategies.core.oracle import Oracle, Step


class AFedPDClient(FederatedClient):
    """Keeps its dual variable, and brings it up to date first; uploads the model's change."""

    algorithm = "a-fedpd"
    state_type = a_fedpd.State

    def first_state(self, theta: Tensor, config: Config) -> a_fedpd.State:
        return a_fedpd.first_state(theta)

    def step(
        self, state: a_fedpd.State, received: Received, oracle: Oracle, config: Config
    ) -> Step:
        rho = value_of(config, "rho")
        return a_fedpd.client_rule(state, received.theta, received.catch_up, oracle, rho=rho)
