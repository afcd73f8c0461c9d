"""Sharpness-aware minimisation: the gradient is taken where the loss is larger.

    at w:   g = grad f(w),   then   grad f(w + s g / ||g||)                     (1)

in place of g, both on the same mini-batch with the same dropout masks. Slope and pull of the
subproblem are added to (1) as to any gradient, at w. Running statistics follow the first pass.

s  radius >= 0, ``LocalTraining.sam``; weight decay, which the solver adds, is no part of g

References: Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-Aware Minimization for Efficiently
Improving Generalization", ICLR 2021, eq. 3; Qu, Li, Duan, Liu, Tang, Lu, "Generalized Federated
Learning via Sharpness Aware Minimization", ICML 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from clients.learning.objective import Objective
from clients.learning.passes import Inputs
from clients.learning.replay import Generators, kept_buffers

Gradient: TypeAlias = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]
"""``gradient(inputs, targets)`` puts a gradient into the model; returns loss and outputs."""


def sharpness_aware(problem: Objective, radius: float) -> Gradient:
    """Return what puts (1) into ``problem.model``, and returns loss and outputs at w."""
    model = problem.model

    def gradient(inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        generators = Generators.of([model.vector])
        loss, outputs = problem.gradient(inputs, targets)
        w, g = model.trained.clone(), model.trained_gradient
        tiny = torch.finfo(g.dtype).tiny
        model.trained.add_(g * (radius / g.norm().clamp_min(tiny)))
        generators.restore()
        with kept_buffers(model.module):
            problem.gradient(inputs, targets)
        model.trained.copy_(w)
        return loss, outputs

    return gradient
