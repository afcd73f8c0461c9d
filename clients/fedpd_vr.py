"""FedPDVR's client half; the rule is in ``fl_strategies.fedpd_vr``."""

from __future__ import annotations

import math

from torch import Tensor

from clients.request import Config, Received, count, value_of
from clients.skipping import SkippingClient
from fl_strategies import fedpd_vr
from fl_strategies.core.oracle import Oracle, Step
from fl_strategies.solvers.own_steps import check_only_fine_tuning


class FedPDVRClient(SkippingClient):
    """Keeps its model, dual variable and gradient; uploads its copy of the global model.

    Reports ``consensus``, ||x+ - x0||^2 in the last algorithm round.
    """

    algorithm = "fedpd-vr"
    state_type = fedpd_vr.State

    def check(self, config: Config) -> None:
        super().check(config)
        check_only_fine_tuning(self.algorithm, config)
        if decay := self.training.updated(config).weight_decay:
            raise ValueError(f"fedpd-vr has no weight decay: weight_decay must be 0, got {decay}")

    def most_steps(self, config: Config) -> float:
        # a step on more samples than the client has counts as several steps
        passes = math.ceil(int(value_of(config, "inner-batch")) / len(self.problem))
        return count(config, "inner-steps") * max(1, passes)

    def first_state(self, theta: Tensor, config: Config) -> fedpd_vr.State:
        return fedpd_vr.first_state(theta)

    def step(
        self, state: fedpd_vr.State, received: Received, oracle: Oracle, config: Config
    ) -> Step:
        return fedpd_vr.client_rule(
            state,
            received.theta,
            oracle,
            eta=float(value_of(config, "eta")),
            gamma=float(value_of(config, "gamma")),
            steps=count(config, "inner-steps"),
            samples=int(value_of(config, "inner-batch")),
            refresh=value_of(config, "round") % count(config, "full-every") == 0,
            x0_rule=value_of(config, "x0-rule"),
        )
