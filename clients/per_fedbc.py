"""Per-FedBC's client half; the rule is in ``fl_strategies.per_fedbc``."""

from __future__ import annotations

from torch import Tensor

from clients.base import Config, FederatedClient, Step, knob
from clients.fedbc import dual_knobs, turn_of
from clients.meta import Derivatives, plain_outer_steps
from fl_strategies import per_fedbc
from fl_strategies.proximity import State, first_state
from fl_strategies.subproblem import Solve


class PerFedBCClient(FederatedClient):
    """Keeps its model, lambda and gamma; uploads its model, and lambda as its weight.

    ``train-loss`` is the mean over all the mini-batches of its gradients.
    """

    algorithm = "per-fedbc"
    state_type = State

    def first_state(self, theta: Tensor, config: Config) -> State:
        return first_state(theta, dual_knobs(config))

    def step(self, state: State, theta: Tensor, solve: Solve, config: Config) -> Step:
        outer = plain_outer_steps(self, config)
        f = Derivatives(self.problem, outer.batches)
        state = per_fedbc.client_rule(
            state,
            theta,
            f.gradient,
            dual=dual_knobs(config),
            turn=turn_of(config),
            steps=outer.steps,
            rate=outer.training.lr,
            inner_rate=knob(config, "inner-rate"),
            inner_steps=knob(config, "inner-steps"),
        )
        scalars = {
            "lambda": state.lam,
            "gamma": state.gamma,
            "train-loss": f.mean_loss,
            "steps": outer.steps,
        }
        return Step(state.x, state, scalars)

    def own_model(self, state: State) -> Tensor:
        own: Tensor = state.x
        return own
