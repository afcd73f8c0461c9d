"""FedPD's client half; the rule is in ``fl_strategies.fedpd``."""

from __future__ import annotations

import torch
from torch import Tensor

from clients.base import Config, FederatedClient, Step, knob
from clients.replay import without_trace
from clients.solvers import Info
from fl_strategies import fedpd
from fl_strategies.randomness import stream
from fl_strategies.subproblem import Solve


class FedPDClient(FederatedClient):
    """Keeps its model, its dual variable and oracle II's g; uploads its idea of the common model.

    Reports ``consensus``, ||x+ - x0||^2 in the last algorithm round.
    """

    algorithm = "fedpd"
    state_type = fedpd.State

    def rounds(self, config: Config) -> range:
        first = int(knob(config, "first-algorithm-round"))
        return range(first, first + int(knob(config, "algorithm-rounds")))

    def first_state(self, theta: Tensor, config: Config) -> fedpd.State:
        return fedpd.first_state(theta)

    def step(self, state: fedpd.State, theta: Tensor, solve: Solve, config: Config) -> Step:
        eta = float(knob(config, "eta"))
        infos: list[Info] = []

        def oracle(state: fedpd.State, x0: Tensor) -> tuple[Tensor, Tensor]:
            if knob(config, "oracle") == "I":
                return fedpd.oracle_one(state, x0, solve, eta=eta)
            x, g, info = self._oracle_two(state, x0, config)
            infos.append(info)
            return x, g

        state, x0_new = fedpd.client_rule(
            state, theta, oracle, eta=eta, x0_rule=knob(config, "x0-rule")
        )
        apart = state.x - theta
        return Step(x0_new, state, {"consensus": float(apart.dot(apart))}, infos)

    def own_model(self, state: fedpd.State) -> Tensor:
        own: Tensor = state.x
        return own

    def _oracle_two(
        self, state: fedpd.State, x0: Tensor, config: Config
    ) -> tuple[Tensor, Tensor, Info]:
        problem, model, r = self.problem, self.problem.model, int(knob(config, "round"))
        rng = stream(int(config.get("seed", 0)), "oracle", r, self.client_id)
        steps, batch = int(knob(config, "inner-steps")), int(knob(config, "inner-batch"))
        model.module.train()
        model.attach_gradients()
        losses, right, seen = 0.0, 0, 0

        def change(new: Tensor, old: Tensor) -> Tensor:
            nonlocal losses, right, seen
            inputs, targets = problem.inputs, problem.targets
            if batch:
                rows = torch.from_numpy(rng.integers(len(problem), size=batch)).to(inputs.device)
                inputs, targets = inputs[rows], targets[rows]
            model.vector.copy_(old)
            # the second gradient then sees the same dropout masks
            with without_trace([model.vector], model.module):
                problem.gradient(inputs, targets)
            before = model.gradient.clone()
            model.vector.copy_(new)
            loss, outputs = problem.gradient(inputs, targets)
            losses, seen = losses + float(loss) * len(targets), seen + len(targets)
            if problem.classifies:
                right += int(problem.right(outputs, targets))
            return model.gradient - before

        x, g = fedpd.oracle_two(
            state,
            x0,
            self.full_gradient,
            change,
            refresh=r % int(knob(config, "full-every")) == 0,
            eta=float(knob(config, "eta")),
            gamma=float(knob(config, "gamma")),
            steps=steps,
        )
        accuracy = right / seen if problem.classifies else float("nan")
        return x, g, Info(steps, 0, losses / seen, accuracy, float("nan"))
