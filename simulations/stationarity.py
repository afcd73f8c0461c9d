"""How far a model is from a stationary point of f = (1/N) sum f_i, and clients from consensus.

Reference: Zhang et al., "FedPD", IEEE Transactions on Signal Processing 2021, (4) and (6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clients import Problem


class Stationarity(NamedTuple):
    """``gradient`` is ||grad f(x0)||^2, ``consensus`` (1/N) sum_i ||x_i - x0||^2 (0 for no x_i)."""

    gradient: float
    consensus: float

    @property
    def gap(self) -> float:
        """Their sum, which is 0 only at stationary points."""
        return self.gradient + self.consensus


def stationarity(
    problems: Sequence[Problem], x0: Tensor, own: Sequence[Tensor] = (), *, ridge: float = 0.0
) -> Stationarity:
    """Return how stationary ``x0`` [d] is for the mean of ``problems``, one per client.

    ``own`` holds the clients' models x_i [d], if there are any. Each f_i includes
    (``ridge``/2) ||w||^2, the term of weight decay, which the problems lack. Gradients are those of
    training mode. The problems' models keep ``x0`` as parameters. Raises ``ValueError`` if there is
    no problem, or if the numbers of models and problems differ.
    """
    if not problems or (own and len(own) != len(problems)):
        raise ValueError(f"problems must be >= 1, got {len(problems)}; models: {len(own)}")
    total = torch.zeros_like(x0)
    for problem in problems:
        total += gradient_at(problem, x0)
    mean = total / len(problems) + ridge * x0
    return Stationarity(_square(mean), sum(_square(x - x0) for x in own) / len(problems))


def gradient_at(problem: Problem, w: Tensor) -> Tensor:
    """Return the gradient [d] of the problem at ``w``, in training mode; its model keeps ``w``."""
    problem.model.write(w)
    problem.model.module.train()
    problem.full_gradient()
    return problem.model.gradient


def _square(v: Tensor) -> float:
    return float(v.dot(v))
