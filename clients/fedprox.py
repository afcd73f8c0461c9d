"""FedProx's client half; the rule is in ``fl_strategies.fedprox``."""

from __future__ import annotations

from torch import Tensor

from clients.base import Config, FederatedClient, State, Step, knob
from fl_strategies import fedprox
from fl_strategies.subproblem import Solve


class FedProxClient(FederatedClient):
    """Uploads its model, trained near the one received; keeps nothing."""

    algorithm = "fedprox"

    def step(self, state: State, theta: Tensor, solve: Solve, config: Config) -> Step:
        return Step(fedprox.client_rule(theta, solve, mu=knob(config, "proximal-mu")))
