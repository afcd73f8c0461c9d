"""SCAFFOLD's client half; the rule is in ``fl_strategies.scaffold``."""

from __future__ import annotations

from torch import Tensor

from clients.base import FederatedClient
from clients.request import Config, Received, value_of
from fl_strategies import scaffold
from fl_strategies.core.oracle import Oracle, Step


class SCAFFOLDClient(FederatedClient):
    """Keeps its control variate; uploads the change of the model and of the control variate."""

    algorithm = "scaffold"
    state_type = scaffold.State
    extra_vectors = (scaffold.CONTROL,)

    def first_state(self, theta: Tensor, config: Config) -> scaffold.State:
        return scaffold.first_state(theta)

    def step(
        self, state: scaffold.State, received: Received, oracle: Oracle, config: Config
    ) -> Step:
        training, option = self.training.updated(config), value_of(config, "option")
        scaffold.check_option(option, training.settings)
        return scaffold.client_rule(
            state,
            received.theta,
            received.extra_vectors[scaffold.CONTROL],
            oracle,
            rate=training.rate,
            option=option,
        )
