"""q-FedAvg's client half; the rule is in ``fl_strategies.q_fedavg``."""

from __future__ import annotations

from torch import Tensor

from clients.base import Config, FederatedClient, State, Step
from fl_strategies import fedavg
from fl_strategies.q_fedavg import LOSS, RATE
from fl_strategies.subproblem import Solve


class QFedAvgClient(FederatedClient):
    """Uploads its model as FedAvg's client, and the received model's loss; keeps nothing."""

    algorithm = "q-fedavg"

    def step(self, state: State, theta: Tensor, solve: Solve, config: Config) -> Step:
        loss = self.problem.evaluate().loss  # of the model received, which is loaded
        w = fedavg.client_rule(theta, solve)
        return Step(w, scalars={LOSS: loss, RATE: self.training.updated(config).lr})
