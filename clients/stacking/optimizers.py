"""Optimizers of a stack of clients, which leave the stack one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from clients.learning.solvers import SOLVERS, Descent, precise
from clients.stacking.plans import batch_size
from clients.stacking.stack import Numbers, Stack
from fl_strategies.core.settings_text import parse_params
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers import delta_sgd, sps
from fl_strategies.solvers.local import LocalTraining, build

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


class GradientDescent:
    """The steps of ``solvers.Descent``."""

    def __init__(self, task: Task, training: LocalTraining) -> None:
        self.w, self.descent = task.w, Descent(training)

    def step(self, closure: Closure, k: int) -> None:
        w = self.w[:k]
        self.descent.move(w, closure(w)[0])


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
    """Delta-SGD; a step size for each client."""

    def __init__(self, task: Task, training: LocalTraining) -> None:
        self.task = task
        self.options = delta_sgd.Options(lr=training.rate, **parse_params(training.solver_params))
        self.state = delta_sgd.first_state(eta_0=self.options.lr, theta_0=self.options.theta_0)

    def step(self, closure: Closure, k: int) -> None:
        x, options = self.task.w[:k].clone(), self.options
        state = delta_sgd.State(*(self.task.part(value, k) for value in self.state))
        g, _ = closure(x)
        old = state.g if state.x is None or not options.same_batch else closure(state.x)[0]
        self.state, w = delta_sgd.step(
            state,
            x,
            g,
            old,
            gamma=options.gamma,
            delta=options.delta,
            epsilon=options.epsilon,
            amplify_first=options.amplify_first,
        )
        self.task.w[:k] = w


class Polyak:
    """SPS; a step size for each client."""

    def __init__(self, task: Task, training: LocalTraining, share: Tensor) -> None:
        self.task, self.share = task, share
        self.options = sps.Options(lr=training.rate, **parse_params(training.solver_params))
        self.state = sps.State(self.options.lr)

    def step(self, closure: Closure, k: int) -> None:
        x, options = self.task.w[:k], self.options
        g, loss = closure(x)
        self.state, w = sps.step(
            sps.State(self.task.part(self.state.eta, k)),
            x,
            precise(self.task.value(loss, x, k)),
            g,
            c=options.c,
            f_star=options.f_star,
            growth=options.growth,
            batch_share=self.share[:k],
            max_step=options.max_step,
        )
        x.copy_(w)


def optimizer_of(task: Task, training: LocalTraining, sizes: Numbers) -> Optimizer:
    """Return the optimizer of ``training``, for clients with ``sizes`` samples."""
    if training.solver in ("gd", "sgd") and not training.solver_params:
        return GradientDescent(task, training)
    if training.solver == "delta-sgd":
        return DeltaSGD(task, training)
    if training.solver == "sps":
        size = batch_size(training)
        share = np.minimum(1.0, size / sizes) if size else np.ones(len(sizes))
        return Polyak(task, training, precise(torch.from_numpy(share[:, None]).to(task.w.device)))
    return Torch(task, training)
