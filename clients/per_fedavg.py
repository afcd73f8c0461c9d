"""Per-FedAvg's client half; the rule is in ``fl_strategies.per_fedavg``."""

from __future__ import annotations

from torch import Tensor

from clients.base import Config, FederatedClient, State, Step, knob
from clients.meta import Derivatives, plain_outer_steps
from fl_strategies import per_fedavg
from fl_strategies.subproblem import Solve


class PerFedAvgClient(FederatedClient):
    """Uploads its model, trained to be one step away from a good one; keeps nothing.

    ``train-loss`` is the mean over all the mini-batches of its gradients.
    """

    algorithm = "per-fedavg"

    def step(self, state: State, theta: Tensor, solve: Solve, config: Config) -> Step:
        outer = plain_outer_steps(self, config)
        f = Derivatives(self.problem, outer.batches)
        w = per_fedavg.client_rule(
            theta,
            f.gradient,
            f.hessian_product if knob(config, "meta-gradient") == "exact" else None,
            steps=outer.steps,
            rate=outer.training.lr,
            inner_rate=knob(config, "inner-rate"),
        )
        return Step(w, scalars={"train-loss": f.mean_loss, "steps": outer.steps})
