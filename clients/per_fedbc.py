"""Per-FedBC's client half; the rule is in ``fl_strategies.per_fedbc``."""

from __future__ import annotations

import itertools

from torch import Tensor

from clients.base import Config, FederatedClient, Step, knob
from clients.fedbc import dual_knobs, turn_of
from clients.solvers import FULL_BATCH
from fl_strategies import per_fedbc
from fl_strategies.proximity import State, first_state
from fl_strategies.randomness import stream
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
        problem, training = self.problem, self.training.updated(config)
        rng = stream(
            int(config.get("seed", 0)), "meta", int(config.get("server-round", 0)), self.client_id
        )
        batch_size = 0 if training.solver in FULL_BATCH else training.batch_size
        epochs = training.epochs
        if training.random_epochs:
            epochs = int(rng.integers(1, training.epochs, endpoint=True))
        steps = training.steps or epochs * -(-len(problem) // (batch_size or len(problem)))
        batches = itertools.chain.from_iterable(
            problem.batches(rng, batch_size) for _ in itertools.count()
        )
        losses: list[Tensor] = []

        def gradient(w: Tensor) -> Tensor:
            problem.model.vector.copy_(w)
            loss, _ = problem.gradient(*next(batches))
            losses.append(loss)
            return problem.model.gradient.clone()

        problem.model.module.train()
        problem.model.attach_gradients()
        state = per_fedbc.client_rule(
            state,
            theta,
            gradient,
            dual=dual_knobs(config),
            turn=turn_of(config),
            steps=steps,
            rate=training.lr,
            inner_rate=knob(config, "inner-rate"),
            inner_steps=knob(config, "inner-steps"),
        )
        scalars = {
            "lambda": state.lam,
            "gamma": state.gamma,
            "train-loss": float(sum(losses)) / len(losses),
            "steps": steps,
        }
        return Step(state.x, state, scalars)

    def own_model(self, state: State) -> Tensor:
        own: Tensor = state.x
        return own
