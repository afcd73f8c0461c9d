"""The local training loop: mini-batches, steps, and when to stop.

A step goes along the gradient of the subproblem (``fl_strategies.core.subproblem``): that of f on a
mini-batch, plus slope, plus pull. Plain ``sgd`` and ``gd`` take it directly (:class:`Descent`), any
other optimizer of PyTorch by its own step (:class:`Optimized`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from clients.learning.border import Border
from clients.learning.data import Batch
from clients.learning.evaluate import Hits
from clients.learning.local_problem import Gradient
from clients.learning.optimizers import make_optimizer
from clients.learning.problem import Problem, into_training
from clients.learning.sam import climbed, sharpness_aware
from clients.learning.terms import value_of
from clients.learning.variance_reduction import variance_reduced
from fl_strategies.core.oracle import Solved
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers.gradient_weights import Weights
from fl_strategies.solvers.local import LocalTraining
from fl_strategies.solvers.rates import factor_of

DESCENT = ("gd", "sgd")
"""Solvers whose steps are taken directly if they have no ``solver_params``."""
COUNTED = 1 << 20
"""Scores that are kept until right answers are counted in them."""


def solve(
    problem: Problem,
    start: Tensor,
    subproblem: Subproblem,
    training: LocalTraining,
    rng: np.random.Generator,
    *,
    previous: Tensor | None = None,
    rates: bool = False,
    until: float | None = None,
    climb: Tensor | None = None,
) -> Solved:
    """Return an approximate minimiser [d] of (0), found from ``start`` [d], and what was done.

    With ``previous``, the iterate before ``start``, the difference of the two is the momentum of
    the first step, and the last two iterates are returned. With ``rates``, which only direct steps
    have, the weights of the gradients are returned. With ``until``, work also ends as
    :meth:`.Oracle.solve` says. ``climb`` [d] is where gradients are taken from w, with
    ``sam_direction="global"``. Loss and accuracy are scalar tensors on the device. Trained arrays
    that do not travel are trained too, inside the module; slope, pull, box and extrapolation do not
    apply to them.
    """
    model = problem.model
    model.write(start)
    into_training(model.module)
    per_epoch = problem.data.per_epoch(training)
    epochs, limit = planned(training, per_epoch, rng)
    gradient = gradient_of(problem, training, climb)
    batch_size = 0 if training.full_batch else training.batch_size
    terms = SlopeAndPull(model, subproblem, start)
    stepper: Descent | Optimized
    # other optimizers do without moves that less precise types are too coarse for
    precise_enough = all(p.dtype.itemsize >= 4 for p in model.trained)
    if training.solver in DESCENT and not training.solver_params and precise_enough:
        stepper = Descent(model, terms, training)
    else:
        share = min(1.0, batch_size / len(problem)) if batch_size else 1.0
        stepper = Optimized(model, terms, training, share)
    path = Path(model, start if previous is None else previous, training)
    weights = Weights(training.momentum, training.nesterov, training.rate * subproblem.pull)
    keeps = training.extrapolation > 0.0 or previous is not None
    steps = done = 0
    residual, enough = math.nan, training.residual
    if until is not None:
        goal = until**2 * residual_of(problem, subproblem, training)
        enough = goal if enough is None else max(goal, enough)
    seen = Measured(problem)
    with stepper.active(), problem.data.leaving_no_trace():
        # a loader without a length may have fewer mini-batches than its samples say
        while (done < epochs or training.steps) and not (limit and steps >= limit):
            seen, before = Measured(problem), steps
            for batch in problem.data.batches(rng, batch_size):
                factor = factor_of(training.lr_schedule, steps, limit or epochs * per_epoch)
                if keeps:
                    path.go_ahead()
                loss, scores = stepper.step(gradient, batch, factor)
                path.project()
                if rates:
                    weights.step(factor)
                seen.add(loss, scores, batch)
                steps += 1
                if steps == limit:
                    break
            done += 1
            if steps == before:
                break
            if enough is not None:
                with stepper.measured():
                    residual = residual_of(problem, subproblem, training)
                if residual <= enough:
                    break
    path.project()  # an optimizer's average may lie outside
    last = path.before if previous is not None else None
    solved = Solved(model.vector, last, steps, done, *seen.means, residual)
    if not rates:
        return solved
    return solved._replace(weight=weights.sum, rates=weights.sum * training.rate)


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


# ---- the gradient of f -------------------------------------------------------------------------


def gradient_of(problem: Problem, training: LocalTraining, climb: Tensor | None = None) -> Gradient:
    """Return what leaves f's gradient on a batch in the parameters, or what stands in its place.

    ``sam`` and ``variance_reduction`` put another one there; its norm is clipped at last.
    """
    gradient: Gradient = problem.gradient
    if training.climbs_globally:
        gradient = gradient if climb is None else climbed(problem, climb)
    elif training.sam:
        gradient = sharpness_aware(problem, training.sam)
    elif training.variance_reduction != "off":
        per_epoch = problem.data.per_epoch(training)
        gradient = variance_reduced(problem, training.variance_reduction, per_epoch)
    if not training.max_grad_norm:
        return gradient

    def clipped(batch: Batch) -> tuple[Tensor, Tensor | None]:
        made = gradient(batch)
        clip_grad_norm_(problem.model.trained, training.max_grad_norm)
        return made

    return clipped


# ---- a step ------------------------------------------------------------------------------------


class SlopeAndPull:
    """What a subproblem adds to f, at the shared parameters of a model that require gradients.

    Slope a and pull r to c are together the pull to c - a/r, up to a constant; numbers of less
    precise types than float32 are too coarse for it.
    """

    def __init__(self, model: Border, subproblem: Subproblem, start: Tensor) -> None:
        slope, pull, centre = subproblem
        self._model, self._pull = model, float(pull)
        sloped = isinstance(slope, Tensor) or slope != 0.0
        if pull and sloped and start.element_size() >= 4:
            slope, centre, sloped = 0.0, centre - slope / pull, False
        self._parameters = [p for p in model.shared if p.requires_grad]
        self._slopes = self._pieces(slope, start) if sloped else []
        self._centres = self._pieces(centre, start) if pull else []
        self._starts = self._pieces(start, start) if sloped and not pull else []

    def move(self, rate: float) -> None:
        """Step by ``rate`` down the gradient of the terms alone."""
        if self._centres:
            torch._foreach_lerp_(self._parameters, self._centres, rate * self._pull)
        elif self._slopes:
            torch._foreach_add_(self._parameters, self._slopes, alpha=-rate)

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradient of the terms to the parameters'."""
        if not (self._slopes or self._centres):
            return
        along = self._model.gradients(self._parameters)
        if self._centres:
            torch._foreach_add_(along, self._offsets(), alpha=self._pull)
        if self._slopes:
            torch._foreach_add_(along, self._slopes)
        for parameter, gradient in zip(self._parameters, along, strict=True):
            parameter.grad = gradient

    @torch.no_grad()
    def value(self) -> Tensor | float:
        """Return the value of the terms, less a constant: 0 is the least, or that at the start."""
        if self._centres:
            return value_of(self._pull, self._slopes, self._offsets())
        moved = torch._foreach_sub(self._parameters, self._starts) if self._slopes else []
        return value_of(0.0, self._slopes, [*moved])

    def _offsets(self) -> list[Tensor]:
        return [*torch._foreach_sub(self._parameters, self._centres)]

    def _pieces(self, vector: Tensor | float, start: Tensor) -> list[Tensor]:
        views = self._model.views(torch.as_tensor(vector).to(start).expand_as(start))
        pairs = zip(views, self._model.shared, strict=True)
        return [view.to(p) for view, p in pairs if p.requires_grad]


class Descent:
    """``torch.optim.SGD`` on the subproblem, without its bookkeeping of each step.

    A parameter that has no gradient is not stepped, unless slope or pull move it.
    """

    def __init__(self, model: Border, terms: SlopeAndPull, training: LocalTraining) -> None:
        self._model, self._terms = model, terms
        self._rate, self._decay = training.rate, training.weight_decay
        self._momentum, self._nesterov = training.momentum, training.nesterov
        self._velocities: dict[nn.Parameter, Tensor] = {}

    def active(self) -> AbstractContextManager[None]:
        """Return the context that steps need: none."""
        return nullcontext()

    def measured(self) -> AbstractContextManager[None]:
        """Return the context in which the model can be measured between steps: any."""
        return nullcontext()

    def step(self, gradient: Gradient, batch: Batch, factor: float) -> tuple[Tensor, Tensor | None]:
        """Take a step, with ``factor`` times the learning rate; return loss and scores before."""
        made = gradient(batch)
        with torch.no_grad():
            self._move(self._rate * factor)
        return made

    def _move(self, rate: float) -> None:
        if self._momentum or self._decay:
            self._terms.add()
        else:
            self._terms.move(rate)
        reached = [p for p in self._model.trained if p.grad is not None]
        along = self._model.gradients(reached)
        if self._decay:
            torch._foreach_add_(along, reached, alpha=self._decay)
        if self._momentum:
            velocities = [self._velocities.setdefault(p, torch.zeros_like(p)) for p in reached]
            torch._foreach_mul_(velocities, self._momentum)
            torch._foreach_add_(velocities, along)
            if self._nesterov:
                torch._foreach_add_(along, velocities, alpha=self._momentum)
            else:
                along = velocities
        torch._foreach_add_(reached, along, alpha=-rate)


class Optimized:
    """Steps of any other optimizer over the module's parameters.

    Gradients that it steps along have the subproblem's terms, and so has a closure's value.
    """

    def __init__(
        self, model: Border, terms: SlopeAndPull, training: LocalTraining, batch_share: float
    ) -> None:
        self._terms = terms
        self.optimizer = make_optimizer(
            training, model.trained, module=model.module, batch_share=batch_share
        )
        self._scheduled = bool(training.lr_schedule)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._with_closure = needs_closure(self.optimizer)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return the context of steps, in which a schedule-free optimizer trains."""
        self._be("train")
        yield
        self._be("eval")

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Return the context between steps in which the model is the one that would be returned."""
        self._be("eval")
        yield
        self._be("train")

    def _be(self, mode: str) -> None:
        if hasattr(self.optimizer, "train") and hasattr(self.optimizer, "eval"):
            getattr(self.optimizer, mode)()

    def step(self, gradient: Gradient, batch: Batch, factor: float) -> tuple[Tensor, Tensor | None]:
        """As of :class:`Descent`."""
        if self._scheduled:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        if not self._with_closure:
            made = gradient(batch)
            self._terms.add()
            self.optimizer.step()
            return made
        evaluations = []

        def closure() -> Any:
            evaluations.append(gradient(batch.copy()))
            self._terms.add()
            return evaluations[-1][0] + self._terms.value()

        self.optimizer.step(closure)
        return evaluations[0]


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` has to be given a closure."""
    parameters = inspect.signature(optimizer.step).parameters.values()
    return any(p.name == "closure" and p.default is p.empty for p in parameters)


class Path:
    """The iterates, where steps go ahead of them or end in a box."""

    def __init__(self, model: Border, previous: Tensor, training: LocalTraining) -> None:
        self._model, self._box = model, training.box
        self._extrapolation = training.extrapolation
        self.before = previous

    def go_ahead(self) -> None:
        """Move to w + extrapolation (w - w_previous), where the next step is taken."""
        here = self._model.vector
        if self._extrapolation:
            self._model.write(here + self._extrapolation * (here - self.before))
        self.before = here

    @torch.no_grad()
    def project(self) -> None:
        """Project onto [-box, box]^d."""
        if self._box:
            for parameter in self._model.shared:
                parameter.clamp_(-self._box, self._box)


# ---- what it came to ---------------------------------------------------------------------------


def residual_of(problem: Problem, subproblem: Subproblem, training: LocalTraining) -> float:
    """Return the squared norm of the subproblem's gradient on all samples."""
    model, ridge = problem.model, training.ridge
    problem.full_gradient()
    w = model.vector
    along = subproblem.gradient(w, model.gradient + ridge * w)
    total = along.dot(along) if model.moves else 0.0
    for parameter, slope in zip(model.own, model.gradients(model.own), strict=True):
        total = total + (slope + ridge * parameter.detach()).square().sum()
    return float(total)


class Measured:
    """The mean loss and accuracy over mini-batches, each measured before its step.

    Right answers are counted in many batches at once, which is fast.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._losses, self._sizes, self._hits = list[Tensor](), list[int](), list[Hits]()
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._numbers = 0

    def add(self, loss: Tensor, scores: Tensor | None, batch: Batch) -> None:
        """Take in what a gradient on ``batch`` returned."""
        self._losses.append(loss)
        self._sizes.append(batch.samples)
        if scores is not None and isinstance(batch.targets, Tensor):
            self._kept.append((scores, batch.targets))
            self._numbers += scores.numel()
            if self._numbers > COUNTED:
                self._count()

    @property
    def means(self) -> tuple[Tensor, Tensor | float]:
        """Loss and accuracy, scalars; the accuracy is NaN where targets are no classes."""
        self._count()
        sizes, losses = self._sizes, precise(torch.stack(self._losses))
        if len({*sizes}) == 1:
            loss = losses.mean()
        else:
            loss = losses.dot(losses.new_tensor(sizes)) / sum(sizes)
        hits = self._hits or [Hits(0, 0)]
        right, counted = (sum(parts[1:], parts[0]) for parts in zip(*hits, strict=True))
        if not isinstance(counted, Tensor):
            return loss, math.nan
        return loss, precise(right) / counted

    def _count(self) -> None:
        if len({(scores.shape[1:], targets.shape[1:]) for scores, targets in self._kept}) == 1:
            scores, targets = zip(*self._kept, strict=True)
            self._kept = [(torch.cat(scores), torch.cat(targets))]
        self._hits += [self._problem.hits(scores, targets) for scores, targets in self._kept]
        self._kept, self._numbers = [], 0


def precise(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in double precision, or in single if the device has no double."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()
