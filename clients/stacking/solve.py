"""Local solvers on a stack of clients: each client takes the steps that it would take alone.

All clients start together. A client leaves the stack after its last step; for that the stack is
sorted by steps, most first. Each client's mini-batches are drawn from its own generator.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.learning.solvers import precise
from clients.stacking.optimizers import Task, optimizer_of
from clients.stacking.plans import Generators, Plan, column, plan
from clients.stacking.stack import Batches, Numbers, Results, Stack
from fl_strategies.core.oracle import Solved
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers.local import LocalTraining


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

    It does what :func:`.solvers.solve` does for each client; numbers become columns. ``work`` is
    the plan, if ``training`` does not say it.
    """
    work = work or plan(stack, training, rngs)
    stack.model.module.train()
    device = stack.model.vector.device
    numbers = np.argsort(-work.steps, kind="stable")
    in_order = bool((numbers == np.arange(len(numbers))).all())
    order = None if in_order else torch.from_numpy(numbers).to(device)
    task = Task(stack, start, subproblem, order)
    w, optimizer = task.w, optimizer_of(task, training, stack.sizes[numbers])
    samples, weights = work.batches
    if order is not None:
        samples, weights = samples[:, order], weights[:, order]
    steps, per_epoch, epochs = (of[numbers] for of in (work.steps, work.per_epoch, work.epochs))
    left = (np.arange(steps.max())[:, None] < steps).sum(1).tolist()
    keeps = training.extrapolation > 0.0 or previous is not None
    before = Task(stack, start if previous is None else previous, Subproblem(), order).w
    losses = w.new_zeros(len(left), len(stack))
    rights = torch.zeros(losses.shape, device=device)
    stopping = Stopping(task, training, work, numbers) if training.residual is not None else None
    last_epochs = int(((epochs - 1) * per_epoch).min())
    sizes = work.sizes[:, numbers]

    def drawing(k: int, place: int) -> AbstractContextManager[None]:
        """Draw the masks of the first ``k`` clients inside."""
        if stack.masks is None:
            return nullcontext()
        return stack.masks.of(numbers[:k], sizes[place if len(sizes) > 1 else 0, :k])

    for step, k in enumerate(left):
        place = step if len(samples) > 1 else 0
        batches = Batches(samples[place, :k], weights[place, :k])
        first: list[Results] = []

        judged = stopping is not None or step >= last_epochs

        def closure(
            at: Tensor,
            batches: Batches = batches,
            k: int = k,
            first: Any = first,
            judged: bool = judged,
            place: int = place,
        ) -> Any:
            with drawing(k, place):
                gradient, results = stack.gradient(at, batches, judged=judged)
            first.append(results)
            return task.bent(gradient, at, k), results.loss

        if keeps:
            here = w[:k].clone()
            if training.extrapolation:
                w[:k].add_(here - before[:k], alpha=training.extrapolation)
        optimizer.step(closure, k)
        if training.box:
            w[:k].clamp_(-training.box, training.box)
        if keeps:
            before[:k] = here
        losses[step, :k] = first[0].loss[:, 0]
        if first[0].right is not None:
            rights[step, :k] = first[0].right[:, 0]
        if stopping is not None and stopping.all_after(step + 1, w, before):
            break
    residual = np.full(len(stack), np.nan)
    if stopping is not None:
        w, before, epochs, residual = (
            stopping.w, stopping.before, stopping.epochs, stopping.residual,
        )  # fmt: skip
        steps = np.minimum(steps, epochs * per_epoch)
        stopping.rewind(rngs)
    at = np.arange(len(left))[:, None]
    last = (at >= (epochs - 1) * per_epoch) & (at < steps)
    counted = np.where(last, sizes[: len(left)], 0)
    loss, accuracy = means(losses, rights, counted)
    if order is not None:
        back = np.argsort(numbers)
        steps, epochs, residual = steps[back], epochs[back], residual[back]
        there = torch.from_numpy(back).to(device)
        w, before, loss, accuracy = w[there], before[there], loss[there], accuracy[there]
    return Solved(
        w,
        before if previous is not None else None,
        column(steps, device),
        column(epochs, device),
        loss,
        accuracy if stack.classifies else math.nan,
        column(residual, device) if stopping is not None else math.nan,
    )


def means(losses: Tensor, rights: Tensor, counted: Numbers) -> tuple[Tensor, Tensor]:
    """Return the mean losses and accuracies of mini-batches, as columns.

    ``losses`` and the numbers of right samples, ``rights``, are [steps, clients]. So are the sizes
    ``counted``, 0 for a mini-batch that does not count.
    """
    sizes = precise(torch.from_numpy(counted).to(losses.device))
    total = sizes.sum(0)[:, None]
    loss = (sizes * precise(losses).where(sizes > 0.0, 0.0)).sum(0)[:, None]
    right = precise(rights).where(sizes > 0.0, 0.0).sum(0)[:, None]
    return loss / total, right / total


class Stopping:
    """Measures residuals after epochs, and keeps the result of clients that are accurate enough.

    Arrays are in the order of ``task``'s clients; ``numbers`` are their numbers in the stack.
    """

    def __init__(self, task: Task, training: LocalTraining, work: Plan, numbers: Numbers) -> None:
        self.task, self.training, self.numbers = task, training, numbers
        self.per_epoch, self.steps = work.per_epoch[numbers], work.steps[numbers]
        self.epochs, self.residual = work.epochs[numbers], np.full(len(numbers), np.nan)
        self.w, self.before = torch.empty_like(task.w), torch.empty_like(task.w)
        self._works, self._work = np.ones(len(numbers), bool), work

    def all_after(self, done: int, w: Tensor, before: Tensor) -> bool:
        """Measure the clients whose epoch ends after ``done`` steps; return whether all stopped."""
        last = self.steps == done
        who = np.flatnonzero(self._works & ((done % self.per_epoch == 0) | last))
        if len(who):
            self.residual[who] = self._measured(who, w)
            small = self.residual[who] <= self.training.residual
            stop = who[small | last[who]]
            self.epochs[stop] = -(-done // self.per_epoch[stop])
            rows = torch.from_numpy(stop).to(w.device)
            self.w[rows], self.before[rows] = w[rows], before[rows]
            self._works[stop] = False
        return not self._works.any()

    def _measured(self, who: Numbers, w: Tensor) -> list[float]:
        task, rows = self.task, torch.from_numpy(who).to(w.device)
        parts = (task.slope, task.pull, task.centre)
        subproblem = Subproblem(*(v[rows] if isinstance(v, Tensor) else v for v in parts))
        at, numbers = w[rows], self.numbers[who]
        if self._work.states:
            g = task.stack.full_gradient(at, numbers)
        else:  # all that there is are these mini-batches
            chosen = torch.from_numpy(numbers).to(w.device)
            g, _ = task.stack.gradient(at, Batches(*(v[0, chosen] for v in self._work.batches)))
        g = subproblem.gradient(at, g)
        if self.training.ridge:
            g = g + self.training.ridge * at
        squares: list[float] = (g * g).sum(1).tolist()
        return squares

    def rewind(self, rngs: Generators) -> None:
        """Put the generators where they are after the epochs that were run."""
        for number, epochs in zip(self.numbers, self.epochs, strict=True):
            if self._work.states:
                rngs[number].bit_generator.state = self._work.states[number][epochs - 1]
