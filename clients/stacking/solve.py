"""Local solvers on a stack of clients: each client takes the steps that it would take alone.

All clients start together. A client leaves the stack after its last step; for that the stack is
sorted by steps, most first. Each client's mini-batches are drawn from its own generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clients.learning.loop import precise
from clients.learning.problem import into_training
from clients.stacking.batches import Generators, Plan, column, plan
from clients.stacking.stack import Batches, Numbers, Results, Stack
from fl_strategies.core.oracle import Solved
from fl_strategies.core.settings_text import parse_params
from fl_strategies.core.stacks import is_nought
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers import delta_sgd
from fl_strategies.solvers.local import LocalTraining

Gradient = Callable[[Tensor], tuple[Tensor, Results]]
"""The subproblems' gradients [k, d] and f's results at w [k, d], on one mini-batch each."""


def solve(
    stack: Stack,
    start: Tensor,
    subproblem: Subproblem,
    training: LocalTraining,
    rngs: Generators,
    *,
    previous: Tensor | None = None,
    work: Plan | None = None,
) -> Solved:
    """Return approximate minimisers [clients, d] of the clients' subproblems, and what was done.

    It does what :func:`.loop.solve` does for each client; numbers become columns. ``work`` is
    the plan, if ``training`` does not say it.
    """
    work = work or plan(stack, training, rngs)
    into_training(stack.model.module)
    like = stack.model.like
    order = np.argsort(-work.steps, kind="stable")
    there, back = (torch.from_numpy(of).to(like.device) for of in (order, np.argsort(order)))

    def arranged(value: Any) -> Any:
        return value[there].to(like) if isinstance(value, Tensor) else value

    w, before = arranged(start), arranged(previous)
    if training.extrapolation and before is None:
        before = w.clone()
    task = Task(stack, Subproblem(*map(arranged, subproblem)))
    batches = Batches(*(part[:, there] for part in work.batches))
    sizes, epochs, per_epoch, steps = (part[..., order] for part in work[1:])
    in_order = Plan(batches, sizes, epochs, per_epoch, steps)
    losses, rights = _walk(task, w, before, in_order, training)
    loss, accuracy = _means_of_last_epochs(losses, rights, in_order)
    return Solved(
        w[back],
        before[back] if previous is not None else None,
        column(work.steps, like.device),
        column(work.epochs, like.device),
        loss[back],
        accuracy[back] if stack.classifies else math.nan,
    )


class Task(NamedTuple):
    """Clients' losses, and what their subproblems add; the last client leaves the stack first."""

    stack: Stack
    subproblem: Subproblem

    def gradient(
        self, w: Tensor, batches: Batches, *, count_right: bool = True
    ) -> tuple[Tensor, Results]:
        """Return the gradients of the first clients' subproblems at w [k, d], and f's results."""
        g, results = self.stack.gradient(w, batches, count_right=count_right)
        slope, pull, centre = (
            part[: len(w)] if isinstance(part, Tensor) else part for part in self.subproblem
        )
        if not is_nought(slope):
            g += slope
        if not is_nought(pull):
            g += pull * (w - centre)
        return g, results


def _walk(
    task: Task, w: Tensor, before: Tensor | None, work: Plan, training: LocalTraining
) -> tuple[Tensor, Tensor]:
    """Take all steps of the clients, from ``w`` [clients, d], which is written over.

    Returns the losses and the numbers of right samples on their mini-batches, [steps, clients].
    ``before``, if it is needed, is the iterate before w, and is written over as well.
    """
    optimizer = DeltaSGD(training) if training.solver == "delta-sgd" else Descent(training)
    left = (np.arange(work.steps.max())[:, None] < work.steps).sum(1).tolist()
    losses = w.new_zeros(len(left), len(w))
    rights = torch.zeros_like(losses)
    first_counted = int(((work.epochs - 1) * work.per_epoch).min())
    for step, k in enumerate(left):
        at = w[:k]
        batches = Batches(*(part[step % len(part), :k] for part in work.batches))
        gradient = partial(task.gradient, batches=batches, count_right=step >= first_counted)
        if before is not None:
            here = at.clone()
            if training.extrapolation:
                at.add_(here - before[:k], alpha=training.extrapolation)
            before[:k] = here
        results = optimizer.step(at, gradient)
        if training.box:
            at.clamp_(-training.box, training.box)
        losses[step, :k] = results.loss
        if results.right is not None:
            rights[step, :k] = results.right
    return losses, rights


def _means_of_last_epochs(losses: Tensor, rights: Tensor, work: Plan) -> tuple[Tensor, Tensor]:
    """Return the mean losses and accuracies [clients, 1] of the clients' last epochs."""
    at = np.arange(len(losses))[:, None]
    last = (at >= (work.epochs - 1) * work.per_epoch) & (at < work.steps)
    counted: Numbers = np.where(last, work.sizes[: len(losses)], 0)
    sizes = precise(torch.from_numpy(counted).to(losses.device))
    total = sizes.sum(0)[:, None]
    loss = (sizes * precise(losses).where(sizes > 0.0, 0.0)).sum(0)[:, None]
    right = precise(rights).where(sizes > 0.0, 0.0).sum(0)[:, None]
    return loss / total, right / total


class Descent:
    """The steps of ``torch.optim.SGD``, with momentum and weight decay.

    Clients leave the stack at its end: a step is of the first clients of the step before.
    """

    def __init__(self, training: LocalTraining) -> None:
        self._training = training
        self._velocity: Tensor | None = None

    def step(self, w: Tensor, gradient: Gradient) -> Results:
        """Move ``w`` [k, d] in place; return the results at the w before."""
        training = self._training
        along, results = gradient(w)
        if training.weight_decay:
            along.add_(w, alpha=training.weight_decay)
        if training.momentum:
            if self._velocity is None:
                self._velocity = velocity = along.clone()
            else:
                velocity = self._velocity[: len(w)].mul_(training.momentum).add_(along)
            along = along.add_(velocity, alpha=training.momentum) if training.nesterov else velocity
        w.add_(along, alpha=-training.rate)
        return results


class DeltaSGD:
    """Delta-SGD; each client has its own step size."""

    def __init__(self, training: LocalTraining) -> None:
        self._options = delta_sgd.Options(lr=training.rate, **parse_params(training.solver_params))
        options = self._options
        self._state = delta_sgd.first_state(eta_0=options.lr, theta_0=options.theta_0)

    def step(self, w: Tensor, gradient: Gradient) -> Results:
        """As :meth:`Descent.step`."""
        options, x = self._options, w.clone()
        state = delta_sgd.State(
            *(part[: len(w)] if isinstance(part, Tensor) else part for part in self._state)
        )
        g, results = gradient(x)
        before = state.g if state.x is None or not options.same_batch else gradient(state.x)[0]
        self._state, moved = delta_sgd.step(
            state,
            x,
            g,
            before,
            gamma=options.gamma,
            delta=options.delta,
            epsilon=options.epsilon,
            amplify_first=options.amplify_first,
        )
        w.copy_(moved)
        return results
