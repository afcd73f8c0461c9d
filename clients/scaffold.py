"""SCAFFOLD's client half; the rule is in ``fl_strategies.scaffold``."""

from __future__ import annotations

from torch import Tensor

from clients.base import Config, FederatedClient, Step, knob
from fl_strategies import scaffold
from fl_strategies.subproblem import Solve, Subproblem


class SCAFFOLDClient(FederatedClient):
    """Keeps its control variate; uploads the change of the model and of the control variate."""

    algorithm = "scaffold"
    state_type = scaffold.State
    beside = (scaffold.CONTROL,)

    def first_state(self, theta: Tensor, config: Config) -> scaffold.State:
        return scaffold.first_state(theta)

    def step(self, state: scaffold.State, theta: Tensor, solve: Solve, config: Config) -> Step:
        training, option = self.training.updated(config), knob(config, "option")
        scaffold.check_plain(training.settings, option)

        def walk(start: Tensor, subproblem: Subproblem) -> tuple[Tensor, float]:
            w = solve(start, subproblem)
            return w, self.infos[-1].steps * training.lr

        state, delta, change = scaffold.client_rule(
            state,
            theta,
            knob(config, scaffold.CONTROL),
            walk,
            gradient=self.full_gradient if option == "I" else None,
        )
        return Step(delta, state, beside={scaffold.CONTROL: change})
