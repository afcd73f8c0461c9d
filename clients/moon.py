"""MOON's client half; the rule is in ``fl_strategies.moon``."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from clients.base import Config, FederatedClient, Step, knob
from clients.problem import CHUNK, Problem
from clients.replay import without_trace
from fl_strategies import fedavg, moon
from fl_strategies.subproblem import Solve


class MOONClient(FederatedClient):
    """Keeps its model and running statistics; uploads its model.

    ``train-loss`` is that of (3), the contrastive term included. Raises ``ValueError`` for a model
    without features (see ``clients.FlatModel``).
    """

    algorithm = "moon"
    state_type = moon.State

    def first_state(self, theta: Tensor, config: Config) -> moon.State:
        return moon.State(theta, self._statistics())

    def objective(self, state: moon.State, theta: Tensor, config: Config) -> Problem:
        model = self.problem.model
        with without_trace([model.vector], model.module):
            model.vector.copy_(theta)
            z_global = frozen_features(self.problem)
            model.vector.copy_(state.w)
            buffers = statistics(model.module)
            pieces = state.statistics.split([buffer.numel() for buffer in buffers])
            for buffer, piece in zip(buffers, pieces, strict=True):
                buffer.copy_(piece.view_as(buffer))
            z_previous = frozen_features(self.problem)
        q = moon.direction(z_global, z_previous, tau=knob(config, "tau"))
        return Contrast(self.problem, q, mu=knob(config, "mu"))

    def step(self, state: moon.State, theta: Tensor, solve: Solve, config: Config) -> Step:
        w = fedavg.client_rule(theta, solve)
        return Step(w, moon.State(w, self._statistics()))

    def _statistics(self) -> Tensor:
        model = self.problem.model
        pieces = [buffer.reshape(-1).to(model.vector) for buffer in statistics(model.module)]
        return torch.cat([model.vector[:0], *pieces])


class Contrast(Problem):
    """f + mu h of ``problem``, by (3), for a fixed q [n, p].

    Its targets are row numbers, by which a batch finds its labels and its rows of q.
    """

    def __init__(self, problem: Problem, q: Tensor, *, mu: float) -> None:
        super().__init__(
            problem.model,
            problem.loss,
            problem.inputs,
            torch.arange(len(problem), device=problem.inputs.device),
            penalty=problem.penalty,
        )
        self.plain, self.q, self.mu = problem, q, mu

    @property
    def classifies(self) -> bool:
        return self.plain.classifies

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.plain.right(outputs, self.plain.targets[targets])

    def _forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        (loss, outputs), z = self.model.with_features(self.plain._forward, x, self.plain.targets[y])
        if not z.requires_grad:
            _warn_once()
        term = -logsigmoid(-moon.excess(z, self.q[y])).mean()
        return loss + self.mu * term, outputs


@torch.no_grad()
def frozen_features(problem: Problem) -> Tensor:
    """Return the features [n, p] of all inputs in the model as it stands, in evaluation mode."""
    problem.model.module.eval()
    batches = zip(
        torch.split(problem.inputs, CHUNK), torch.split(problem.targets, CHUNK), strict=True
    )
    return torch.cat([problem.model.with_features(problem._forward, x, y)[1] for x, y in batches])


def statistics(module: nn.Module) -> list[Tensor]:
    """Return the module's floating-point buffers."""
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


@functools.cache
def _warn_once() -> None:
    logging.getLogger("flwr").warning(
        "the model's features do not depend on its parameters: moon is fedavg with it"
    )
