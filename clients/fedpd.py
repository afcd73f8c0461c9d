"""FedPD's client half; the rule is in ``fl_strategies.fedpd``."""

from __future__ import annotations

from torch import Tensor

from clients.request import Config, Received, value_of
from clients.skipping import SkippingClient
from fl_strategies import fedpd
from fl_strategies.core.oracle import Oracle, Step


class FedPDClient(SkippingClient):
    """Keeps its model and its dual variable; uploads its copy of the global model.

    Reports ``consensus``, ||x+ - x0||^2 in the last algorithm round.
    """

    algorithm = "fedpd"
    state_type = fedpd.State

    def first_state(self, theta: Tensor, config: Config) -> fedpd.State:
        return fedpd.first_state(theta)

    def step(self, state: fedpd.State, received: Received, oracle: Oracle, config: Config) -> Step:
        return fedpd.client_rule(
            state,
            received.theta,
            oracle,
            eta=float(value_of(config, "eta")),
            x0_rule=value_of(config, "x0-rule"),
        )
