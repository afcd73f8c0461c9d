"""pFedMe's client half; the rule is in ``fl_strategies.pfedme``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from clients.base import Config, FederatedClient, Step, knob
from clients.meta import outer_steps
from clients.solvers import Info, solve
from fl_strategies import pfedme
from fl_strategies.subproblem import Solve, Subproblem


class PFedMeClient(FederatedClient):
    """Keeps its own model theta; uploads its copy of the common model, moved towards theta.

    ``train-loss`` and ``train-accuracy`` are theta's before the last step on a mini-batch, and with
    ``residual`` that of (1) after it: their means over the mini-batches.
    """

    algorithm = "pfedme"
    state_type = pfedme.State

    def first_state(self, theta: Tensor, config: Config) -> pfedme.State:
        return pfedme.first_state(theta)

    def step(self, state: pfedme.State, theta: Tensor, _: Solve, config: Config) -> Step:
        outer = outer_steps(self, config)
        inner = replace(
            outer.training,
            epochs=int(knob(config, "inner-steps")),  # of one step: the batch is all there is
            random_epochs=False,
            steps=0,
            batch_size=0,
        )
        infos: list[Info] = []

        def solve_on_next(start: Tensor, subproblem: Subproblem) -> Tensor:
            batch = self.problem.on(*next(outer.batches))
            found, info = solve(batch, start, subproblem, inner, outer.rng)
            infos.append(info)
            return found

        state, w = pfedme.client_rule(
            state,
            theta,
            solve_on_next,
            lam=knob(config, "lam"),
            eta=knob(config, "eta"),
            steps=outer.steps,
            local_start=knob(config, "local-start"),
        )
        _, _, loss, accuracy, residual = np.mean(infos, axis=0).tolist()
        taken = sum(info.steps for info in infos)
        return Step(w, state, infos=[Info(taken, 0, loss, accuracy, residual)])

    def own_model(self, state: pfedme.State) -> Tensor:
        own: Tensor = state.theta
        return own
