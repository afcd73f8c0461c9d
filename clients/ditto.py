"""Ditto's client half; the rule is in ``fl_strategies.ditto``."""

from __future__ import annotations

from torch import Tensor

from clients.base import FederatedClient
from clients.request import Config, Received, value_of
from fl_strategies import ditto
from fl_strategies.core.oracle import Oracle, Step


class DittoClient(FederatedClient):
    """Keeps its personalized model; uploads its trained copy of the global model."""

    algorithm = "ditto"
    state_type = ditto.State

    def first_state(self, theta: Tensor, config: Config) -> ditto.State:
        return ditto.first_state(theta)

    def most_steps(self, config: Config) -> float:
        return 2 * super().most_steps(config)

    def step(self, state: ditto.State, received: Received, oracle: Oracle, config: Config) -> Step:
        return ditto.client_rule(state, received.theta, oracle, lam=value_of(config, "lam"))

    @staticmethod
    def personalized_model(state: ditto.State) -> Tensor:
        own: Tensor = state.v
        return own
