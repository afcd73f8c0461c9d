"""pFedMe's client half; the rule is in ``fl_strategies.pfedme``."""

from __future__ import annotations

from torch import Tensor

from clients.base import FederatedClient
from clients.request import Config, Received, count, value_of
from fl_strategies import pfedme
from fl_strategies.core.oracle import Oracle, Step


class PFedMeClient(FederatedClient):
    """Keeps its personalized model theta; uploads the global model, moved towards theta.

    ``train-loss`` and ``train-accuracy`` are theta's before the last step on each mini-batch, and
    ``residual`` is that of (1) after this step: means over the mini-batches.
    """

    algorithm = "pfedme"
    state_type = pfedme.State

    def first_state(self, theta: Tensor, config: Config) -> pfedme.State:
        return pfedme.first_state(theta)

    def most_steps(self, config: Config) -> float:
        return super().most_steps(config) * count(config, "inner-steps")

    def step(self, state: pfedme.State, received: Received, oracle: Oracle, config: Config) -> Step:
        return pfedme.client_rule(
            state,
            received.theta,
            oracle,
            lam=value_of(config, "lam"),
            eta=value_of(config, "eta"),
            steps=oracle.steps,
            inner_steps=count(config, "inner-steps"),
            local_start=value_of(config, "local-start"),
        )

    @staticmethod
    def personalized_model(state: pfedme.State) -> Tensor:
        own: Tensor = state.theta
        return own
