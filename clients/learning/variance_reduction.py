"""Variance-reduced gradients: that of a mini-batch, corrected by the one on all samples.

    SVRG    g = grad f_B(w) - grad f_B(w~) + grad f(w~)                         (1)
    SARAH   g = grad f_B(w) - grad f_B(w-) + g-                                 (2)

in place of grad f_B(w); both gradients of B have the same dropout masks. Each epoch begins with
g = grad f(w) on all of the client's samples, which (1) and (2) are for w~ = w- = w and g- = g.
Slope and pull of the subproblem are added to g as to any gradient, so that every rule can train by
it: with FedProx's pull it is FedProx-VR.

w~      the model at the beginning of the epoch
w-, g-  the model and the gradient g of the step before

A step costs two gradients of a mini-batch, an epoch one of all samples in addition. Running
statistics follow the passes at w.

References: Johnson, Zhang, "Accelerating Stochastic Gradient Descent using Predictive Variance
Reduction", NIPS 2013; Nguyen, Liu, Scheinberg, Takac, "SARAH: A Novel Method for Machine Learning
Problems Using Stochastic Recursive Gradient", ICML 2017, Algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clients.learning.data import Batch, fixed_samples
from clients.learning.local_problem import Gradient
from clients.learning.problem import Problem
from clients.learning.replay import Generators, kept_buffers


def variance_reduced(problem: Problem, kind: str, per_epoch: int) -> Gradient:
    """Return what leaves g in the parameters of the problem, and returns loss and scores at w.

    ``kind`` is "svrg" or "sarah"; an epoch has ``per_epoch`` mini-batches.
    """
    model = problem.model
    steps = 0
    before: list[Tensor] = []  # w~ or w-
    along: list[Tensor] = []  # g there

    def gradient(batch: Batch) -> tuple[Tensor, Tensor | None]:
        nonlocal steps, before, along
        trained = model.trained
        w = [p.detach().clone() for p in trained]
        if steps % per_epoch == 0:
            with fixed_samples("variance-reduction needs tensors"):
                problem.full_gradient()
            before, along = w, model.gradients(trained)
        steps += 1
        generators = Generators.of(model.shared[:1])
        with torch.no_grad():
            torch._foreach_copy_(trained, before)
        with kept_buffers(model.module):
            problem.gradient(batch.copy())
        with torch.no_grad():
            correction = torch._foreach_sub(along, model.gradients(trained))
            torch._foreach_copy_(trained, w)
        generators.restore()
        made = problem.gradient(batch)
        corrected = torch._foreach_add(model.gradients(trained), correction)
        for parameter, g in zip(trained, corrected, strict=True):
            parameter.grad = g
        if kind == "sarah":
            before, along = w, [g.clone() for g in corrected]
        return made

    return gradient
