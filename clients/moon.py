"""MOON's client half; the rule is in ``fl_strategies.moon``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from clients.base import FederatedClient
from clients.learning.drawn import fixed_samples
from clients.learning.model import FlatModel
from clients.learning.objective import Objective
from clients.learning.oracle import ClientOracle
from clients.learning.problem import Problem
from clients.learning.replay import without_trace
from clients.request import Config, Received, value_of
from fl_strategies import fedavg, moon
from fl_strategies.core.log import LOGGER
from fl_strategies.core.oracle import Step


class MOONClient(FederatedClient):
    """Keeps its model and running statistics; uploads its model.

    ``train-loss`` is the loss (3), which includes the contrastive term. Raises ``ValueError`` for a
    model without features (see ``clients.FlatModel``), and for a problem with a ``gradient`` of its
    own.
    """

    algorithm = "moon"
    state_type = moon.State

    def first_state(self, theta: Tensor, config: Config) -> moon.State:
        return moon.State(theta, statistics_of(self.problem.model))

    def step(
        self, state: moon.State, received: Received, oracle: ClientOracle, config: Config
    ) -> Step:
        theta, mu, tau = received.theta, value_of(config, "mu"), value_of(config, "tau")
        made = fedavg.client_rule(theta, oracle.on(contrast, state, theta, mu=mu, tau=tau))
        return made._replace(state=moon.State(made.upload, statistics_of(self.problem.model)))


def contrast(
    problem: Objective, state: moon.State, theta: Tensor, *, mu: float, tau: float
) -> Contrast:
    """Return (3), with the features of the two fixed models; the model stays as it was."""
    with fixed_samples("MOON needs a Problem"):
        _ = problem.whole
    model = problem.model
    with without_trace([model.vector], model.module):
        model.vector.copy_(theta)
        z_global = frozen_features(problem)
        model.vector.copy_(state.w)
        buffers = statistics(model.module)
        pieces = state.statistics.split([buffer.numel() for buffer in buffers])
        for buffer, piece in zip(buffers, pieces, strict=True):
            buffer.copy_(piece.view_as(buffer))
        z_previous = frozen_features(problem)
    return Contrast(problem, moon.direction(z_global, z_previous, tau=tau), mu=mu)


class Contrast(Problem):
    """f + mu h of ``problem``, by (3), for a fixed q [n, p].

    Its targets are sample numbers, by which a mini-batch finds its labels and its rows of q.
    """

    def __init__(self, problem: Objective, q: Tensor, *, mu: float) -> None:
        if problem.own_gradient:
            raise ValueError(
                f"MOON needs the gradient of f + mu h, got {type(problem).__name__} with a"
                " gradient of f of its own, which would stay unused"
            )
        inputs, self.labels = problem.whole
        rows = torch.arange(len(problem), device=self.labels.device)
        super().__init__(problem.model, problem.loss, inputs, rows, penalty=problem.penalty)
        self.plain, self.q, self.mu = problem, q, mu

    @property
    def classifies(self) -> bool:
        return self.plain.classifies

    def right(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int | Tensor]:
        return self.plain.right(outputs, self.labels[targets])

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        labels = self.labels[targets]
        (loss, outputs), z = self.model.with_features(self.plain.forward, inputs, labels)
        if not z.requires_grad:
            warn_of_no_effect()
        return loss + self.mu * terms(z, self.q[targets]).mean(), outputs


@torch.no_grad()
def frozen_features(problem: Objective) -> Tensor:
    """Return the features [n, p] of all inputs in the current model, in evaluation mode."""
    problem.model.module.eval()
    features = [problem.model.with_features(problem.forward, x, y)[1] for x, y in problem.chunks()]
    return torch.cat(features)


def statistics(module: nn.Module) -> list[Tensor]:
    """Return the module's floating-point buffers."""
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


def statistics_of(model: FlatModel) -> Tensor:
    """Return the module's floating-point buffers as one vector [b]."""
    pieces = [buffer.reshape(-1).to(model.vector) for buffer in statistics(model.module)]
    return torch.cat([model.vector[:0], *pieces])


def terms(z: Tensor, q: Tensor) -> Tensor:
    """Return (6) of each sample, by its features z [..., p] and its q [..., p]."""
    return -logsigmoid(-moon.excess(z, q))


@functools.cache
def warn_of_no_effect() -> None:
    """Warn that MOON equals FedAvg with this model."""
    LOGGER.warning("the model's features do not depend on its parameters: with it MOON is FedAvg")
