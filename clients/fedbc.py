"""FedBC's client half; the rule is in ``fl_strategies.fedbc``."""

from __future__ import annotations

import math

from torch import Tensor

from clients.base import FederatedClient
from clients.request import Config, Received, value_of
from fl_strategies import fedbc
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.proximity import Dual, State, Turn, check_alpha_gamma, first_state


def dual_of(config: Config) -> Dual:
    """Return the hyperparameters of the dual step that a request carries."""
    check_alpha_gamma(value_of(config, "gamma"), config)
    if value_of(config, "gamma") != "heuristic":
        config = {**config, "alpha-gamma": 0.0}
    config = {"lambda-max": math.inf, **config}
    return Dual(*(value_of(config, name.replace("_", "-")) for name in Dual._fields))


def turn_of(config: Config) -> Turn:
    """Return the client's position in the order of dual steps."""
    return Turn(value_of(config, "dual-clock"), value_of(config, "dual-after"))


class FedBCClient(FederatedClient):
    """Keeps its model, lambda and gamma; uploads its model, and lambda as its weight."""

    algorithm = "fedbc"
    state_type = State

    def first_state(self, theta: Tensor, config: Config) -> State:
        return first_state(theta, dual_of(config))

    def step(self, state: State, received: Received, oracle: Oracle, config: Config) -> Step:
        return fedbc.client_rule(
            state,
            received.theta,
            oracle,
            dual=dual_of(config),
            turn=turn_of(config),
            local_start=value_of(config, "local-start"),
        )

    @staticmethod
    def personalized_model(state: State) -> Tensor:
        own: Tensor = state.x
        return own
