"""FedBC's client half; the rule is in ``fl_strategies.fedbc``."""

from __future__ import annotations

from torch import Tensor

from clients.base import Config, FederatedClient, Step, knob
from fl_strategies import fedbc
from fl_strategies.proximity import Dual, State, Turn, first_state
from fl_strategies.subproblem import Solve


def dual_knobs(config: Config) -> Dual:
    """Return the knobs of the dual step that a request carries."""
    return Dual(*(knob(config, name.replace("_", "-")) for name in Dual._fields))


def turn_of(config: Config) -> Turn:
    """Return the client's place among the dual steps of all."""
    return Turn(knob(config, "dual-clock"), knob(config, "dual-after"))


class FedBCClient(FederatedClient):
    """Keeps its model, lambda and gamma; uploads its model, and lambda as its weight."""

    algorithm = "fedbc"
    state_type = State

    def first_state(self, theta: Tensor, config: Config) -> State:
        return first_state(theta, dual_knobs(config))

    def step(self, state: State, theta: Tensor, solve: Solve, config: Config) -> Step:
        state = fedbc.client_rule(
            state,
            theta,
            solve,
            dual=dual_knobs(config),
            turn=turn_of(config),
            local_start=knob(config, "local-start"),
        )
        return Step(state.x, state, {"lambda": state.lam, "gamma": state.gamma})

    def own_model(self, state: State) -> Tensor:
        own: Tensor = state.x
        return own
