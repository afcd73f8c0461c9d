"""How far a model is from a stationary point of f = (1/N) sum f_i, and clients from consensus.

Reference: Zhang et al., "FedPD", IEEE Transactions on Signal Processing 2021, (4) and (6).
FedADMM's and FedBCD's papers have gaps of their own: :func:`admm_gap`, :func:`cloud_gap`.
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


def admm_gap(
    problems: Sequence[Problem], theta: Tensor, own: Sequence[tuple[Tensor, Tensor]], rho: float
) -> float:
    """Return V of FedADMM, which is 0 only where all w_i = theta and theta is stationary.

    V = ||sum_i (y_i + rho (w_i - theta))||^2
        + sum_i (||grad f_i(w_i) + y_i + rho (w_i - theta)||^2 + ||w_i - theta||^2)

    ``own`` holds each client's (w_i, y_i), both [d]. Raises ``ValueError`` if the numbers of
    problems and of pairs differ. Reference: Gong et al., ICDE 2022, (7).
    """
    slope, total = torch.zeros_like(theta), 0.0
    for problem, (w, y) in zip(problems, own, strict=True):
        pull = y + rho * (w - theta)
        total += _square(gradient_at(problem, w) + pull) + _square(w - theta)
        slope += pull
    return total + _square(slope)


class CloudGap(NamedTuple):
    """Theorem 1's three numbers for FedBCD, each 0 at a stationary point.

    ``devices``: the mean over devices of max over the box of <grad f_i(x_i, z), x_i - x>;
    ``pull``: ||sum_i gamma (z - x_i)||^2; ``consensus``: the largest ||z - z_n||.
    """

    devices: float
    pull: float
    consensus: float


def cloud_gap(
    problems: Sequence[Problem],
    own: Sequence[Tensor],
    clouds: Sequence[Tensor],
    *,
    gamma: float,
    box: float,
) -> CloudGap:
    """Return how far FedBCD is from a stationary point, z being the mean of the z_n.

    ``own`` holds the devices' models x_i [d], ``clouds`` the cloud servers' z_n [d]. f_i is the
    device's loss plus (gamma/2) ||x_i - z||^2. Raises ``ValueError`` if the numbers of problems and
    of devices' models differ. Reference: Wu et al., AAAI 2021, Theorem 1.
    """
    z = torch.stack([*clouds]).mean(0)
    devices = []
    for problem, x in zip(problems, own, strict=True):
        slope = gradient_at(problem, x) + gamma * (x - z)
        devices.append(float((slope * x + box * slope.abs()).sum()))  # the worst corner of the box
    pull = gamma * (len(own) * z - torch.stack([*own]).sum(0))
    apart = max(_square(z - one) ** 0.5 for one in clouds)
    return CloudGap(sum(devices) / len(devices), _square(pull), apart)


def gradient_at(problem: Problem, w: Tensor) -> Tensor:
    """Return the gradient [d] of the problem at ``w``, in training mode; its model keeps ``w``."""
    problem.model.vector.copy_(w)
    problem.model.module.train()
    problem.full_gradient()
    return problem.model.gradient.clone()


def _square(v: Tensor) -> float:
    return float(v.dot(v))
