"""FedAvg's client half; the rule is in ``fl_strategies.fedavg``."""

from __future__ import annotations

from torch import Tensor

from clients.base import Config, FederatedClient, State, Step
from fl_strategies import fedavg
from fl_strategies.subproblem import Solve


class FedAvgClient(FederatedClient):
    """Uploads its model, trained from the one received; keeps nothing."""

    algorithm = "fedavg"

    def step(self, state: State, theta: Tensor, solve: Solve, config: Config) -> Step:
        return Step(fedavg.client_rule(theta, solve))
