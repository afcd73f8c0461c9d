"""Sharpness-aware minimisation: the gradient is taken where the loss is larger.

    at w:   g = grad f(w),   then   grad f(w + s g / ||g||)                     (1)

in place of g, both on the same mini-batch with the same dropout masks. Slope and pull of the
subproblem are added to (1) as to any gradient, at w. Running statistics follow the first pass.

s  radius >= 0, ``LocalTraining.sam``; weight decay, which the solver adds, is no part of g

With ``sam_direction="global"`` (FedLESAM) the direction is where the global model came from, so
that a step takes one gradient, with which running statistics and the reported loss are measured:

    d = theta' - theta,   grad f(w + s d / ||d||)                               (2)

theta   global model [d] as received, in all trained arrays that travel
theta'  the one that the client received in its last round whose reply was used; a client that has
        none, or received the same model again, takes the gradient at w

References: Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-Aware Minimization for Efficiently
Improving Generalization", ICLR 2021, eq. 3; Qu, Li, Duan, Liu, Tang, Lu, "Generalized Federated
Learning via Sharpness Aware Minimization", ICML 2022; Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang,
"Locally Estimated Global Perturbations are Better than Local Perturbations for Federated
Sharpness-aware Minimization", ICML 2024, Algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clients.learning.data import Batch
from clients.learning.local_problem import Gradient
from clients.learning.problem import Problem
from clients.learning.replay import Generators, kept_buffers


def climb_of(before: Tensor | None, theta: Tensor, radius: float) -> Tensor | None:
    """Return s d / ||d|| of (2), from theta' = ``before`` [d]; None where there is no direction."""
    if before is None or torch.equal(before, theta):
        return None
    d = before - theta
    return d.mul_(radius / torch.linalg.vector_norm(d))


def climbed(problem: Problem, climb: Tensor) -> Gradient:
    """Return what leaves (2) in the parameters of the problem, and returns loss and scores there.

    ``climb`` is s d / ||d|| [d].
    """
    shared = problem.model.shared
    moves = [move.to(p) for move, p in zip(problem.model.views(climb), shared, strict=True)]

    def gradient(batch: Batch) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            w = [p.clone() for p in shared]
            torch._foreach_add_(shared, moves)
        made = problem.gradient(batch)
        with torch.no_grad():
            torch._foreach_copy_(shared, w)
        return made

    return gradient


def sharpness_aware(problem: Problem, radius: float) -> Gradient:
    """Return what leaves (1) in the parameters of the problem, and returns loss and scores at w."""
    model = problem.model

    def gradient(batch: Batch) -> tuple[Tensor, Tensor | None]:
        generators = Generators.of(model.shared[:1])
        made = problem.gradient(batch.copy())
        with torch.no_grad():
            reached = [p for p in model.trained if p.grad is not None]
            w, g = [p.clone() for p in reached], model.gradients(reached)
            norm = torch.stack(torch._foreach_norm(g)).norm()
            tiny = torch.finfo(norm.dtype).tiny
            torch._foreach_add_(reached, [*torch._foreach_mul(g, radius / norm.clamp_min(tiny))])
        generators.restore()
        with kept_buffers(model.module):
            problem.gradient(batch)
        with torch.no_grad():
            torch._foreach_copy_(reached, w)
        return made

    return gradient
