"""Local solvers on a stack of clients: each client takes the steps that it would take alone.

All clients start together. A client leaves the stack after its last step; for that the stack is
sorted by steps, most first. Each client's mini-batches are drawn from its own generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from clients.learning.solvers import SOLVERS, precise
from clients.stacking.plans import Generators, Plan, batch_size, column, plan
from clients.stacking.stack import Batches, Found, Numbers, Stack
from fl_strategies import delta_sgd, sps
from fl_strategies.core.local import LocalTraining, build
from fl_strategies.core.oracle import Solved
from fl_strategies.core.params import parse_params
from fl_strategies.core.subproblem import Subproblem

ELEMENTWISE = ("gd", "sgd", "adam", "adagrad")
"""Solvers of torch that act on every entry of a vector separately."""
STACKED = (*ELEMENTWISE, "delta-sgd", "sps")


class Task:
    """The clients' subproblems at their current w; the last client leaves the stack first.

    ``w`` and the iterate before it, ``before``, are [clients, d]; the first ``k`` clients remain.
    """

    def __init__(
        self, stack: Stack, start: Tensor, subproblem: Subproblem, order: Tensor | None
    ) -> None:
        like = stack.model.vector

        def arranged(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return (value if order is None else value[order]).to(like)

        self.stack, self.order = stack, order
        self.w = arranged(start).clone(memory_format=torch.contiguous_format)
        self.slope, self.pull, self.centre = map(arranged, subproblem)
        self.sloped = isinstance(self.slope, Tensor) or self.slope != 0.0
        self.pulled = isinstance(self.pull, Tensor) or self.pull != 0.0
        self._floor: Any = None

    def part(self, value: Any, k: int) -> Any:
        """Return the first ``k`` rows of a vector or column."""
        return value[:k] if isinstance(value, Tensor) else value

    def bent(self, g: Tensor, w: Tensor, k: int) -> Tensor:
        """Return the subproblems' gradients at w, written into ``g``, the gradients of f."""
        if self.sloped:
            g += self.part(self.slope, k)
        if self.pulled:
            g += self.part(self.pull, k) * (w - self.part(self.centre, k))
        return g

    def value(self, loss: Tensor, w: Tensor, k: int) -> Tensor:
        """Return the subproblems' losses [k, 1], less the least value of slope and pull."""
        slope, pull, centre = (self.part(v, k) for v in (self.slope, self.pull, self.centre))
        if self.sloped:
            loss = loss + (slope * w).sum(1, keepdim=True)
        if self.pulled:
            loss = loss + (pull / 2) * (w - centre).square().sum(1, keepdim=True)
        value: Tensor = loss - self.part(self.floor, k)
        return value

    @property
    def floor(self) -> Any:
        """The least value of <a, w> + (r/2) ||w - c||^2; without a pull, the value at the start."""
        if self._floor is None:
            self._floor = 0.0
            if isinstance(self.slope, Tensor):
                at = self.centre - self.slope / (2.0 * self.pull) if self.pulled else self.w
                self._floor = (self.slope * at).sum(1, keepdim=True)
        return self._floor


class Optimizer(Protocol):
    """Takes steps for the clients that remain in a stack."""

    def step(self, closure: Closure, k: int) -> None:
        """Move the first ``k`` clients along what ``closure(w [k, d])`` returns."""


Closure = Callable[[Tensor], tuple[Tensor, Tensor]]
"""The subproblems' gradients [k, d] and f's losses [k, 1] at w [k, d], on one mini-batch each."""


class Descent:
    """Gradient descent with momentum: the steps of ``solvers.Descent``."""

    def __init__(self, task: Task, training: LocalTraining) -> None:
        self.w, self.training = task.w, training
        self.velocity: Tensor | None = None

    def step(self, closure: Closure, k: int) -> None:
        w, training = self.w[:k], self.training
        along, _ = closure(w)
        if training.weight_decay:
            along.add_(w, alpha=training.weight_decay)
        if training.momentum:
            if self.velocity is None:
                self.velocity = along.clone()
            else:
                self.velocity[:k].mul_(training.momentum).add_(along)
            velocity = self.velocity[:k]
            along = along.add_(velocity, alpha=training.momentum) if training.nesterov else velocity
        w.add_(along, alpha=-training.rate)


class Torch:
    """A torch optimizer that acts on every entry separately; all vectors are one parameter."""

    def __init__(self, task: Task, training: LocalTraining) -> None:
        self.w = task.w
        self.gradient = torch.zeros_like(task.w)
        parameter = torch.nn.Parameter(task.w)
        parameter.grad = self.gradient
        self.optimizer = build(SOLVERS[str(training.solver)], training, [parameter])

    def step(self, closure: Closure, k: int) -> None:
        done = self.w[k:].clone()
        self.gradient[:k] = closure(self.w[:k])[0]
        self.optimizer.step()
        self.w[k:] = done


class DeltaSGD:
    """Delta-SGD, by the rule of ``fl_strategies.delta_sgd``; a step size for each client."""

    def __init__(self, task: Task, training: LocalTraining) -> None:
        self.w = task.w
        self.options = delta_sgd.Options(lr=training.rate, **parse_params(training.solver_params))
        self.eta: Any = self.options.lr
        self.theta: Any = self.options.theta_0
        self.x: Tensor | None = None
        self.g: Tensor | None = None

    def step(self, closure: Closure, k: int) -> None:
        x, options, first = self.w[:k].clone(), self.options, self.x is None
        g, _ = closure(x)
        x_before = x if self.x is None else self.x[:k]
        g_before = g if self.g is None else self.g[:k]
        if options.same_batch and not first:
            g_before, _ = closure(x_before)
        if options.amplify_first or not first:
            moved, changed = (
                vector_norm(v, dim=1, keepdim=True, dtype=torch.float64)
                for v in (x - x_before, g - g_before)
            )
            eta, theta = (v[:k] if isinstance(v, Tensor) else v for v in (self.eta, self.theta))
            self.eta, self.theta = delta_sgd.step_size(
                moved, changed, eta, theta, gamma=options.gamma, delta=options.delta,
                epsilon=options.epsilon,
            )  # fmt: skip
        self.w[:k] = x - self.eta * g
        self.x, self.g = x, g


class Polyak:
    """SPS, by the rule of ``fl_strategies.sps``; a step size for each client."""

    def __init__(self, task: Task, training: LocalTraining, share: Tensor) -> None:
        self.task, self.share = task, share
        self.options = sps.Options(lr=training.rate, **parse_params(training.solver_params))
        self.eta: Any = self.options.lr

    def step(self, closure: Closure, k: int) -> None:
        w, options = self.task.w[:k], self.options
        g, loss = closure(w)
        square = vector_norm(g, dim=1, keepdim=True, dtype=torch.float64).square()
        eta, self.eta = sps.step_size(
            precise(self.task.value(loss, w, k)),
            square,
            self.task.part(self.eta, k),
            c=options.c,
            f_star=options.f_star,
            growth=options.growth,
            batch_share=self.share[:k],
            max_step=options.max_step,
        )
        w.sub_(eta * g)


def optimizer_of(task: Task, training: LocalTraining, sizes: Numbers) -> Optimizer:
    """Return the optimizer of ``training``, for clients with ``sizes`` samples."""
    if training.solver in ("gd", "sgd") and not training.solver_params:
        return Descent(task, training)
    if training.solver == "delta-sgd":
        return DeltaSGD(task, training)
    if training.solver == "sps":
        size = batch_size(training)
        share = np.minimum(1.0, size / sizes) if size else np.ones(len(sizes))
        return Polyak(task, training, precise(torch.from_numpy(share[:, None]).to(task.w.device)))
    return Torch(task, training)


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
        first: list[Found] = []

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
                gradient, found = stack.gradient(at, batches, judged=judged)
            first.append(found)
            return task.bent(gradient, at, k), found.loss

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
        found: list[float] = (g * g).sum(1).tolist()
        return found

    def rewind(self, rngs: Generators) -> None:
        """Put the generators where they are after the epochs that were run."""
        for number, epochs in zip(self.numbers, self.epochs, strict=True):
            if self._work.states:
                rngs[number].bit_generator.state = self._work.states[number][epochs - 1]
