"""Per-FedBC's client half; the rule is in ``fl_strategies.per_fedbc``."""

from __future__ import annotations

from torch import Tensor

from clients.base import FederatedClient
from clients.fedbc import dual_of, turn_of
from clients.request import Config, Received, count, value_of
from fl_strategies import per_fedbc
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.proximity import State, first_state
from fl_strategies.solvers.own_steps import check_own_steps


class PerFedBCClient(FederatedClient):
    """Keeps its model, lambda and gamma; uploads its model, and lambda as its weight.

    ``train-loss`` is the mean over the mini-batches of all its gradients.
    """

    algorithm = "per-fedbc"
    state_type = State

    def first_state(self, theta: Tensor, config: Config) -> State:
        return first_state(theta, dual_of(config))

    def most_steps(self, config: Config) -> float:
        return super().most_steps(config) * (1 + count(config, "inner-steps"))

    def step(self, state: State, received: Received, oracle: Oracle, config: Config) -> Step:
        training = self.training.updated(config)
        check_own_steps(self.algorithm, training.settings)
        return per_fedbc.client_rule(
            state,
            received.theta,
            oracle,
            dual=dual_of(config),
            turn=turn_of(config),
            steps=oracle.steps,
            rate=training.rate,
            inner_rate=value_of(config, "inner-rate"),
            inner_steps=count(config, "inner-steps"),
        )

    @staticmethod
    def personalized_model(state: State) -> Tensor:
        own: Tensor = state.x
        return own
