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

from torch import Tensor

from clients.learning.drawn import fixed_samples
from clients.learning.objective import Objective
from clients.learning.passes import Inputs
from clients.learning.replay import Generators, kept_buffers
from clients.learning.sam import Gradient


def variance_reduced(problem: Objective, kind: str, per_epoch: int) -> Gradient:
    """Return what puts g into ``problem.model``, and returns loss and outputs at w.

    ``kind`` is "svrg" or "sarah"; an epoch has ``per_epoch`` mini-batches.
    """
    model = problem.model
    steps, before, along = 0, model.trained, model.trained_gradient  # w~ or w-, and g there

    def gradient(inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal steps, before, along
        w = model.trained.clone()
        if steps % per_epoch == 0:
            with fixed_samples("variance-reduction needs a Problem"):
                problem.full_gradient()
            before, along = w, model.trained_gradient.clone()
        steps += 1
        generators = Generators.of([model.vector])
        model.trained.copy_(before)
        with kept_buffers(model.module):
            problem.gradient(inputs, targets)
        correction = along - model.trained_gradient
        model.trained.copy_(w)
        generators.restore()
        loss, outputs = problem.gradient(inputs, targets)
        model.trained_gradient.add_(correction)
        if kind == "sarah":
            before, along = w, model.trained_gradient.clone()
        return loss, outputs

    return gradient
