"""FedPD's client half; the rule is in ``fl_strategies.fedpd``."""

from __future__ import annotations

import math

from torch import Tensor

from clients.base import FederatedClient
from clients.request import Config, Received, count, value_of
from fl_strategies import fedpd
from fl_strategies.core.oracle import Oracle, Step


class FedPDClient(FederatedClient):
    """Keeps its model, its dual variable and oracle II's g; uploads its copy of the global model.

    Reports ``consensus``, ||x+ - x0||^2 in the last algorithm round.
    """

    algorithm = "fedpd"
    state_type = fedpd.State

    def rounds(self, config: Config) -> range:
        first = int(value_of(config, "first-algorithm-round"))
        return range(first, first + count(config, "algorithm-rounds"))

    def most_steps(self, config: Config) -> float:
        if value_of(config, "oracle") == "I":
            return super().most_steps(config)
        # a step on more samples than the client has counts as several steps
        passes = math.ceil(int(value_of(config, "inner-batch")) / len(self.problem))
        return count(config, "inner-steps") * max(1, passes)

    def first_state(self, theta: Tensor, config: Config) -> fedpd.State:
        return fedpd.first_state(theta)

    def step(self, state: fedpd.State, received: Received, oracle: Oracle, config: Config) -> Step:
        fedpd.check_oracle(value_of(config, "oracle"), config)
        return fedpd.client_rule(
            state,
            received.theta,
            oracle,
            eta=float(value_of(config, "eta")),
            x0_rule=value_of(config, "x0-rule"),
            two=self._variance_reduced(config) if value_of(config, "oracle") == "II" else None,
        )

    @staticmethod
    def own_model(state: fedpd.State) -> Tensor:
        own: Tensor = state.x
        return own

    def _variance_reduced(self, config: Config) -> fedpd.VarianceReduced:
        if decay := self.training.updated(config).weight_decay:
            raise ValueError(f"oracle II has no weight decay: weight_decay must be 0, got {decay}")
        return fedpd.VarianceReduced(
            gamma=float(value_of(config, "gamma")),
            steps=count(config, "inner-steps"),
            samples=int(value_of(config, "inner-batch")),
            refresh=value_of(config, "round") % count(config, "full-every") == 0,
        )
