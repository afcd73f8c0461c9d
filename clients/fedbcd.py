"""The client half of FedBCD, sync-cloud and async-cloud; its rule is in ``fl_strategies.bcd``.

A device cannot tell whether cloud servers wait for each other.
"""

from __future__ import annotations

from torch import Tensor

from clients.base import FederatedClient
from clients.request import Config, Received, value_of
from fl_strategies.bcd import fedbcd, fedbcd_i
from fl_strategies.core.oracle import Oracle, Step


class Device(FederatedClient):
    """A client that keeps a personalized model."""

    @staticmethod
    def personalized_model(state: fedbcd.State | fedbcd_i.State) -> Tensor:
        own: Tensor = state.x
        return own

    def counts_steps(self, config: Config) -> bool:
        """Whether the request counts K in mini-batch steps; else K counts epochs."""
        return self.training.updated(config).steps > 0


class FedBCDClient(Device):
    """Keeps its model and the iterate before it; uploads the model's change."""

    algorithm = "fedbcd"
    state_type = fedbcd.State

    def first_state(self, theta: Tensor, config: Config) -> fedbcd.State:
        return fedbcd.first_state(theta)

    def step(self, state: fedbcd.State, received: Received, oracle: Oracle, config: Config) -> Step:
        return fedbcd.client_rule(
            state,
            received.theta,
            oracle,
            gamma=value_of(config, "gamma"),
            by_steps=self.counts_steps(config),
        )
