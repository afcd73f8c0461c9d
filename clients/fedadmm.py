"""FedADMM's client half; the rule is in ``fl_strategies.fedadmm``."""

from __future__ import annotations

from torch import Tensor

from clients.base import Config, FederatedClient, Step, knob
from fl_strategies import fedadmm
from fl_strategies.subproblem import Solve


class FedADMMClient(FederatedClient):
    """Keeps its model and dual variable; uploads the change of w + y/rho."""

    algorithm = "fedadmm"
    state_type = fedadmm.State

    def first_state(self, theta: Tensor, config: Config) -> fedadmm.State:
        return fedadmm.first_state(theta, rho=knob(config, "rho"))

    def step(self, state: fedadmm.State, theta: Tensor, solve: Solve, config: Config) -> Step:
        state, delta = fedadmm.client_rule(
            state,
            theta,
            solve,
            rho=knob(config, "rho"),
            local_start=knob(config, "local-start"),
            tracking=knob(config, "tracking"),
        )
        return Step(delta, state)

    def own_model(self, state: fedadmm.State) -> Tensor:
        own: Tensor = state.w
        return own
