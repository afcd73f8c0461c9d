"""FedBCD-I's client half; its rule is ``fl_strategies.bcd.fedbcd_i.client_rule``."""

from __future__ import annotations

from torch import Tensor

from clients.fedbcd import Device
from clients.request import Config, Received, count, value_of
from fl_strategies.bcd import fedbcd_i
from fl_strategies.core.oracle import Oracle, Step


class FedBCDIClient(Device):
    """Trains for the rounds it was available in, takes the pull step, and uploads its model."""

    algorithm = "fedbcd-i"
    state_type = fedbcd_i.State

    def first_state(self, theta: Tensor, config: Config) -> fedbcd_i.State:
        return fedbcd_i.first_state(theta)

    def most_steps(self, config: Config) -> float:
        return super().most_steps(config) * count(config, "offline-rounds")

    def step(
        self, state: fedbcd_i.State, received: Received, oracle: Oracle, config: Config
    ) -> Step:
        return fedbcd_i.client_rule(
            state,
            received.theta,
            oracle,
            gamma=value_of(config, "gamma"),
            rounds=count(config, "offline-rounds"),
            box=value_of(config, "box") or None,
            by_steps=self.counts_steps(config),
        )
