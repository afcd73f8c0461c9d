"""Local work in outer steps, each on fresh mini-batches: Per-FedAvg, Per-FedBC, pFedMe."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from clients.base import Config, FederatedClient
from clients.problem import Problem
from clients.solvers import FULL_BATCH, LocalTraining
from fl_strategies.meta import check_plain_steps
from fl_strategies.randomness import stream


class Outer(NamedTuple):
    """What a request asks for: how many outer steps, and mini-batches for them without end."""

    steps: int
    batches: Iterator[tuple[Tensor, Tensor]]
    training: LocalTraining
    rng: np.random.Generator


def outer_steps(client: FederatedClient, config: Config) -> Outer:
    """Return the outer steps that ``config`` asks of ``client``.

    They are the ``steps`` of its training (drawn U{1..steps} by ``random-steps``), or ``epochs``
    times the number of its mini-batches. The mini-batches are those of one epoch after another, in
    an order drawn anew for each.
    """
    problem, training = client.problem, client.training.updated(config)
    rng = stream(
        int(config.get("seed", 0)), "meta", int(config.get("server-round", 0)), client.client_id
    )
    batch_size = 0 if training.solver in FULL_BATCH else training.batch_size
    epochs = training.epochs
    if training.random_epochs:
        epochs = int(rng.integers(1, training.epochs, endpoint=True))
    steps = training.steps or epochs * -(-len(problem) // (batch_size or len(problem)))
    if training.random_steps and training.steps:
        steps = int(rng.integers(1, training.steps, endpoint=True))
    batches = itertools.chain.from_iterable(
        problem.batches(rng, batch_size) for _ in itertools.count()
    )
    return Outer(steps, batches, training, rng)


def plain_outer_steps(client: FederatedClient, config: Config) -> Outer:
    """As :func:`outer_steps`; raise ``ValueError`` if more is asked for than plain steps."""
    outer = outer_steps(client, config)
    check_plain_steps(client.algorithm, outer.training.settings)
    return outer


class Derivatives:
    """f's gradient, and its Hessian times a vector, each on the next of ``batches``."""

    def __init__(self, problem: Problem, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        self._problem, self._batches = problem, batches
        self._losses: list[Tensor] = []
        problem.model.module.train()
        problem.model.attach_gradients()

    def gradient(self, w: Tensor) -> Tensor:
        """Return the gradient [d] at ``w`` [d]."""
        self._problem.model.vector.copy_(w)
        loss, _ = self._problem.gradient(*next(self._batches))
        self._losses.append(loss)
        return self._problem.model.gradient.clone()

    def hessian_product(self, w: Tensor, v: Tensor) -> Tensor:
        """Return the Hessian at ``w`` [d] times ``v`` [d]."""
        self._problem.model.vector.copy_(w)
        return self._problem.hessian_product(*next(self._batches), v)

    @property
    def mean_loss(self) -> float:
        """The mean loss over the mini-batches of all gradients."""
        return float(sum(self._losses)) / len(self._losses)
