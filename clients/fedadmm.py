"""FedADMM's client half; the rule is in ``fl_strategies.fedadmm``."""

from __future__ import annotations

from torch import Tensor

from clients.base import FederatedClient
from clients.request import Config, Received, value_of
from fl_strategies import fedadmm
from fl_strategies.core.oracle import Oracle, Step


class FedADMMClient(FederatedClient):
    """Keeps its model and dual variable; uploads the change of w + y/rho."""

    algorithm = "fedadmm"
    state_type = fedadmm.State

    def first_state(self, theta: Tensor, config: Config) -> fedadmm.State:
        return fedadmm.first_state(theta, rho=value_of(config, "rho"))

    def step(
        self, state: fedadmm.State, received: Received, oracle: Oracle, config: Config
    ) -> Step:
        return fedadmm.client_rule(
            state,
            received.theta,
            oracle,
            rho=value_of(config, "rho"),
            local_start=value_of(config, "local-start"),
            tracking=value_of(config, "tracking"),
        )

    @staticmethod
    def personalized_model(state: fedadmm.State) -> Tensor:
        own: Tensor = state.w
        return own
