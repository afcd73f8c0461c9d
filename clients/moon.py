"""MOON's client half; the rule is in ``fl_strategies.moon``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from clients.base import FederatedClient
from clients.learning.border import Border
from clients.learning.data import fixed_samples
from clients.learning.evaluate import Hits
from clients.learning.oracle import ClientOracle
from clients.learning.problem import Problem, evaluating
from clients.learning.replay import without_trace
from clients.request import Config, Received
from fl_strategies import fedavg, moon
from fl_strategies.core.log import LOGGER
from fl_strategies.core.oracle import Step


class MOONClient(FederatedClient):
    """Keeps its model and running statistics; uploads its model.

    ``train-loss`` is the loss (3), which includes the contrastive term. Raises ``ValueError`` for a
    model without features (see ``clients.Border``), and for a problem with a ``gradient`` of its
    own.
    """

    algorithm = "moon"
    state_type = moon.State
    stacks = False  # its loss compares features with those of two fixed models

    def first_state(self, theta: Tensor, config: Config) -> moon.State:
        return moon.State(theta, statistics_of(self.problem.model))

    def step(
        self, state: moon.State, received: Received, oracle: ClientOracle, config: Config
    ) -> Step:
        theta, mu, tau = received.theta, config["mu"], config["tau"]
        made = fedavg.client_rule(theta, oracle.on(contrast, state, theta, mu=mu, tau=tau))
        return made._replace(state=moon.State(made.upload, statistics_of(self.problem.model)))


def contrast(
    problem: Problem, state: moon.State, theta: Tensor, *, mu: float, tau: float
) -> Contrast:
    """Return (3), with the features of the two fixed models; the model stays as it was."""
    model = problem.model
    with fixed_samples("MOON needs tensors"):
        _ = problem.data.whole
    with without_trace(model.shared[:1], model.module):
        model.write(theta)
        z_global = frozen_features(problem)
        model.write(state.w)
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

    def __init__(self, problem: Problem, q: Tensor, *, mu: float) -> None:
        if problem.own_gradient:
            raise ValueError(
                f"MOON needs the gradient of f + mu h, got {type(problem).__name__} with a"
                " gradient of f of its own, which would stay unused"
            )
        inputs, self.labels, _ = problem.data.whole
        rows = torch.arange(len(problem), device=self.labels.device)
        super().__init__(problem.model, problem.loss, inputs, rows, penalty=problem.penalty)
        self.micro_batch = problem.micro_batch
        self.plain, self.q, self.mu = problem, q, mu

    def hits(self, scores: Tensor, targets: Tensor) -> Hits:
        return self.plain.hits(scores, self.labels[targets])

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        labels = self.labels[targets]
        (loss, outputs), z = with_features(self.plain, inputs, labels)
        if not z.requires_grad:
            warn_of_no_effect()
        return loss + self.mu * terms(z, self.q[targets]).mean(), outputs


def with_features(problem: Problem, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
    """Return ``problem.forward(inputs, targets)``, and the features [n, p] of the inputs.

    The features come from this same pass: they have its dropout masks and carry gradients. Raises
    ``ValueError`` if the pass runs no head, or runs a head on other than n rows.
    """
    seen: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    hooks = [head.register_forward_pre_hook(note) for head in problem.model.heads]
    try:
        result = problem.forward(inputs, targets)
    finally:
        for hook in hooks:
            hook.remove()
    samples = len(targets)
    if not seen or len(seen[-1]) != samples:
        rows = f"{len(seen[-1])} rows for {samples} inputs" if seen else "no nn.Linear that runs"
        raise ValueError(
            f"features are the input of the model's last linear layer, and it has {rows}:"
            " name the module whose input they are by Border(module, head=...)"
        )
    return result, seen[-1].flatten(1).to(problem.model.dtype)


@torch.no_grad()
def frozen_features(problem: Problem) -> Tensor:
    """Return the features [n, p] of all inputs in the current model, in evaluation mode."""
    with evaluating(problem.model.module):
        passes = [with_features(problem, x, y) for x, y, _ in problem.data.chunks()]
    return torch.cat([features for _, features in passes])


def statistics(module: nn.Module) -> list[Tensor]:
    """Return the module's floating-point buffers."""
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


def statistics_of(model: Border) -> Tensor:
    """Return the module's floating-point buffers as one vector [b]."""
    like = model.like
    return torch.cat([like, *(one.reshape(-1).to(like) for one in statistics(model.module))])


def terms(z: Tensor, q: Tensor) -> Tensor:
    """Return (6) of each sample, by its features z [..., p] and its q [..., p]."""
    return -logsigmoid(-moon.excess(z, q))


@functools.cache
def warn_of_no_effect() -> None:
    """Warn that MOON equals FedAvg with this model."""
    LOGGER.warning("the model's features do not depend on its parameters: with it MOON is FedAvg")
