"""Local solvers, written once on the subproblem of ``fl_strategies.core.subproblem``.

A solver steps along the gradient of the subproblem: the gradient of f on a mini-batch, plus slope,
plus pull. It is a ``torch.optim.Optimizer`` over one parameter, the model's vector. So any
optimizer works with any algorithm. Plain ``sgd`` and ``gd`` take the same steps directly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from clients.learning.objective import Move, Objective
from clients.learning.optimizers import SPS, DeltaSGD
from clients.learning.passes import Inputs
from clients.learning.sam import Gradient, sharpness_aware
from clients.learning.variance_reduction import variance_reduced
from fl_strategies.core.oracle import Solved
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers.local import TORCH, LocalTraining, build, torch_solver

MakeOptimizer: TypeAlias = Callable[..., Optimizer]
"""``make([parameter], lr=...)``: an optimizer class, or a function that builds one. If it takes
``module`` or ``batch_share``, it gets the torch module or batch size / data set size."""

SOLVERS: dict[str, MakeOptimizer] = {
    **{name: torch_solver(name) for name in TORCH},
    "delta-sgd": DeltaSGD,
    "sps": SPS,
}
"""Solvers by name; ``gd`` and ``lbfgs`` run on the full batch. Any other name is looked up in
``torch.optim`` (``"RMSprop"``)."""

GRADIENT_ONLY = ("gd", "sgd", "adam", "adagrad", "delta-sgd")
"""Solvers that do not use the loss, so that the subproblem's loss is not computed."""

DESCENT = ("gd", "sgd")
"""Solvers whose steps are taken directly if they have no ``solver_params``."""


class Descent:
    """``torch.optim.SGD`` to the bit, without its bookkeeping of each step."""

    def __init__(self, training: LocalTraining) -> None:
        self.rate, self.decay = training.rate, training.weight_decay
        self.momentum, self.nesterov = training.momentum, training.nesterov
        self.velocity: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether a step is one along the gradient alone."""
        return not (self.momentum or self.decay)

    def move(self, w: Tensor, along: Tensor) -> None:
        """Step from ``w`` down the gradient ``along``; both are written over.

        They are vectors [d], or [clients, d]: then later steps may be of the first clients alone.
        """
        if self.decay:
            along.add_(w, alpha=self.decay)
        if self.momentum:
            if self.velocity is None:
                self.velocity = along.clone()
                velocity = self.velocity
            else:
                velocity = self.velocity[: len(along)].mul_(self.momentum).add_(along)
            along = along.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        w.add_(along, alpha=-self.rate)


def make_optimizer(
    training: LocalTraining, parameters: list[torch.nn.Parameter], **offered: Any
) -> Optimizer:
    """Return the optimizer over ``parameters``, called with the ``offered`` arguments it takes."""
    make = training.solver
    if isinstance(make, str):
        make = SOLVERS[make] if make in SOLVERS else torch_solver(make)
    optimizer: Optimizer = build(make, training, parameters, **offered)
    return optimizer


def solve(
    problem: Objective,
    start: Tensor,
    subproblem: Subproblem,
    training: LocalTraining,
    rng: np.random.Generator,
    *,
    previous: Tensor | None = None,
) -> Solved:
    """Return an approximate minimiser [d] of (0), found from ``start`` [d], and what was done.

    With ``previous``, the iterate before ``start``, the difference of the two is the momentum of
    the first step, and the last two iterates are returned. Loss and accuracy are scalar tensors on
    the device. Trained arrays that do not travel are trained too, inside the model; slope, pull,
    box and extrapolation do not apply to them.
    """
    model = problem.model
    model.vector.copy_(start)
    model.module.train()
    batch_size = 0 if training.full_batch else training.batch_size
    optimizer = _optimizer(problem, training, batch_size)
    half = model.vector.element_size() < 4  # too coarse to move along slope and pull apart from f
    subproblem = subproblem if half else _completed(subproblem, start)
    needs_loss = training.solver not in GRADIENT_ONLY
    bent = _bend(problem, subproblem, start, needs_loss)
    plain = isinstance(optimizer, Descent) and optimizer.plain and problem.descends
    other = _other_gradient(problem, training)
    plain = plain and other is None and not (half and subproblem.bends)
    gradient = other or problem.gradient
    follow = _follower(model.vector, subproblem, training.rate)

    def step(x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        """Take a step on a mini-batch; return its loss and outputs before the step."""
        if plain:
            first = [problem.descend(x, y, training.rate, follow)]
        else:
            first = []

            def closure() -> Tensor:
                loss, outputs = gradient(x, y)
                first.append((loss, outputs))
                return bent(loss)

            if isinstance(optimizer, Descent):
                closure()
                optimizer.move(model.trained, model.trained_gradient)
            else:
                optimizer.step(closure)  # type: ignore[arg-type]
        if training.box:
            model.vector.clamp_(-training.box, training.box)
        return first[0]

    epochs, limit = planned(training, problem.planned(training), rng)
    keeps_previous = training.extrapolation > 0.0 or previous is not None
    before = start if previous is None else previous
    steps = done = 0
    residual = math.nan
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    while done < epochs:
        seen = []
        for x, y in problem.batches(rng, batch_size):
            here = model.vector.clone() if keeps_previous else before
            if training.extrapolation:
                model.vector.add_(here - before, alpha=training.extrapolation)
            loss, outputs = step(x, y)
            before = here
            seen.append((loss, outputs, y))
            steps += 1
            if steps == limit:
                break
        done += 1
        if training.residual is not None:
            bent(problem.full_gradient())
            if training.ridge:
                model.trained_gradient.add_(model.trained, alpha=training.ridge)
            residual = float(model.trained_gradient.dot(model.trained_gradient))
            if residual <= training.residual:
                break
    last = before if previous is not None else None
    return Solved(model.vector.clone(), last, steps, done, *measured(problem, seen), residual)


def planned(training: LocalTraining, per_epoch: int, rng: np.random.Generator) -> tuple[int, int]:
    """Return how many epochs to run, and the number of steps to end at (0: at the epochs' end).

    An epoch has ``per_epoch`` mini-batches. Random numbers are drawn for the epochs first, then
    for the steps.
    """
    epochs, limit = training.epochs, training.steps
    if training.random_epochs:
        epochs = int(rng.integers(1, training.epochs, endpoint=True))
    if training.random_steps:
        limit = int(rng.integers(1, limit, endpoint=True))
    if training.step_limit and training.step_limit < (limit or epochs * per_epoch):
        limit = training.step_limit
    if limit:
        epochs = math.ceil(limit / per_epoch)
    return epochs, limit


def measured(
    problem: Objective, seen: list[tuple[Tensor, Tensor, Tensor]]
) -> tuple[Tensor, Tensor | float]:
    """Return the mean loss and accuracy, scalars, over batches of (loss, outputs, targets).

    The accuracy is NaN where targets are no classes.
    """
    sizes = [len(y) for _, _, y in seen]
    losses = precise(torch.stack([loss for loss, _, _ in seen]))
    if len({*sizes}) == 1:
        loss = losses.mean()
    else:
        loss = losses.dot(losses.new_tensor(sizes)) / sum(sizes)
    if not problem.classifies:
        return loss, math.nan
    batches = [(outputs, y) for _, outputs, y in seen]
    if len({(outputs.shape[1:], y.shape[1:]) for outputs, y in batches}) == 1:  # one count is fast
        outputs, targets = zip(*batches, strict=True)
        batches = [(torch.cat(outputs), torch.cat(targets))]
    rights, counts = zip(*itertools.starmap(problem.right, batches), strict=True)
    return loss, precise(sum(rights)) / sum(counts)


def precise(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in double precision, or in single if the device has no double."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def _optimizer(problem: Objective, training: LocalTraining, batch_size: int) -> Optimizer | Descent:
    model = problem.model
    if training.solver in DESCENT and not training.solver_params:
        return Descent(training)
    parameter = torch.nn.Parameter(model.trained)
    parameter.grad = model.trained_gradient
    share = min(1.0, batch_size / len(problem)) if batch_size else 1.0
    return make_optimizer(training, [parameter], module=model.module, batch_share=share)


def _other_gradient(problem: Objective, training: LocalTraining) -> Gradient | None:
    """Return what computes the gradients where it is not f's on the mini-batch at w."""
    if training.sam:
        return sharpness_aware(problem, training.sam)
    if training.variance_reduction != "off":
        return variance_reduced(problem, training.variance_reduction, problem.planned(training))
    return None


def _bend(
    problem: Objective, subproblem: Subproblem, start: Tensor, needs_loss: bool
) -> Callable[[Tensor], Tensor]:
    """Return a function that turns f's gradient (in place) and loss into the subproblem's."""
    model = problem.model
    slope, pull, centre = subproblem
    sloped = isinstance(slope, Tensor) or slope != 0.0
    # the slope has no least value: SPS, which needs a lower bound, gets the value at ``start``
    floor = slope.dot(start) if needs_loss and isinstance(slope, Tensor) else 0.0

    def bent(loss: Tensor) -> Tensor:
        if sloped:
            model.gradient.add_(slope)
            if needs_loss:
                loss = loss + (slope * model.vector).sum()
        if pull:
            offset = model.vector - centre
            model.gradient.add_(offset, alpha=pull)
            if needs_loss:
                loss = loss + (pull / 2) * offset.dot(offset)
        return loss - floor if needs_loss else loss

    return bent


def _follower(vector: Tensor, subproblem: Subproblem, rate: float) -> Move | None:
    """Return what moves ``vector`` by ``rate`` along slope or pull; None if (0) is f alone.

    The subproblem is :func:`_completed`: it has one of the two at most.
    """
    slope, pull, centre = subproblem
    if isinstance(centre, Tensor) and pull:
        return lambda: vector.lerp_(centre, rate * pull)
    return (lambda: vector.add_(slope, alpha=-rate)) if subproblem.bends else None


def _completed(subproblem: Subproblem, start: Tensor) -> Subproblem:
    """Return (0) less a constant: slope a and pull r to c are together the pull to c - a/r.

    So a step needs one pass over the vectors less, and what is added to f has the least value 0.
    """
    slope, pull, centre = subproblem
    if not pull:
        return subproblem
    if isinstance(slope, Tensor) or slope != 0.0:
        centre = centre - slope / pull
    return Subproblem(0.0, pull, torch.as_tensor(centre).to(start).expand_as(start))
