"""FedDyn's client half; the rule is in ``fl_strategies.feddyn``."""

from __future__ import annotations

from torch import Tensor

from clients.base import FederatedClient
from clients.request import Config, Received, value_of
from fl_strategies import feddyn
from fl_strategies.core.oracle import Oracle, Step


class FedDynClient(FederatedClient):
    """Keeps its dual variable; uploads the change of the model."""

    algorithm = "feddyn"
    state_type = feddyn.State

    def first_state(self, theta: Tensor, config: Config) -> feddyn.State:
        return feddyn.first_state(theta)

    def step(self, state: feddyn.State, received: Received, oracle: Oracle, config: Config) -> Step:
        return feddyn.client_rule(state, received.theta, oracle, alpha=value_of(config, "alpha"))
