"""The oracle of a stack of clients (``fl_strategies.core.oracle``).

Every client gets what it would get if it trained alone: its mini-batches are drawn from its own
streams, in the same order. Vectors are [clients, d], and numbers that differ between clients are
columns [clients, 1].
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from clients.learning.oracle import on_all
from clients.learning.problem import Problem
from clients.learning.solvers import planned, precise
from clients.stacking.forms import FORMS
from clients.stacking.masks import Masks, dropouts
from clients.stacking.plans import (
    Generators,
    Plan,
    batch_size,
    batches_per_epoch,
    column,
    drawn_orders,
    laid_out,
)
from clients.stacking.solve import solve
from clients.stacking.stack import Batches, Numbers, Stack
from fl_strategies.core.oracle import Gradient, Solved
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers.local import LocalTraining


class StackOracle:
    """The oracle of clients whose f_i are those of ``problems``, weight decay included.

    Parameters
    ----------
    problems : sequence of Problem
        All have one model, loss and penalty, and none has an :func:`.obstacles.obstacle`.
    training : LocalTraining
        How all clients solve their subproblems; its solver is one of ``optimizers.STACKED``.
    rngs : sequence of numpy.random.Generator
        The generator of each client's ``solve``.
    streams : callable
        ``streams(purpose)`` returns each client's generator of that purpose.
    seeds : sequence of int
        The seed of each client's dropout masks; needed if the module has dropout.
    samples_at_once : int
        The most samples, of all clients together, in one forward pass over whole data sets.
        Mini-batches are never cut.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        training: LocalTraining,
        rngs: Generators,
        streams: Callable[[str], Generators],
        *,
        seeds: Sequence[int] = (),
        samples_at_once: int = 1 << 20,
    ) -> None:
        self.problems, self.training = problems, training
        self.stack = Stack(problems, samples_at_once=samples_at_once)
        self.stack.masks = Masks(seeds) if dropouts(self.stack.model.module) else None
        self._rngs, self._streams = rngs, streams
        self._draws: Iterator[Batches] | None = None

    def on(self, make: Callable[..., Any], *args: Any, **options: Any) -> StackOracle:
        """As :meth:`.ClientOracle.on`; ``LookupError`` if the loss has no form for stacks."""
        stacked = next((form.stacked for form in FORMS.values() if form.make is make), None)
        if stacked is None:
            raise LookupError(f"{make.__name__} has no form for stacks")
        other = copy.copy(self)
        other.stack = stacked(self.stack, *args, **options)
        return other

    @property
    def steps(self) -> Any:
        """As :attr:`.Oracle.steps`."""
        return column(self._next.steps, self.stack.model.vector.device)

    def solve(
        self, start: Tensor, subproblem: Subproblem, *, previous: Tensor | None = None
    ) -> Solved:
        """As :meth:`.Oracle.solve`."""
        return solve(self.stack, start, subproblem, self.training, self._rngs, previous=previous)

    def solve_aside(self, start: Tensor, subproblem: Subproblem) -> Solved:
        """As :meth:`.Oracle.solve_aside`: stacked models have no running statistics."""
        return self.solve(start, subproblem)

    def solve_on_next(self, start: Tensor, subproblem: Subproblem, *, steps: Any) -> Solved:
        """As :meth:`.Oracle.solve_on_next`."""
        batches, sizes = next(self._next)
        counts = np.ravel(np.asarray(steps)).astype(np.int64) * np.ones_like(sizes)
        each = Batches(*(part[None] for part in batches))
        work = Plan(each, sizes[None], counts, np.ones_like(sizes), counts, [])
        training = on_all(self.training, int(counts.max()))
        return solve(self.stack, start, subproblem, training, self._rngs, work=work)

    def gradient(self, w: Tensor) -> Gradient:
        """As :meth:`.Oracle.gradient`; the accuracy is not measured."""
        return self._gradient(w, [(next(self._next)[0], 1.0)])._replace(accuracy=math.nan)

    def hessian_product(self, w: Tensor, v: Tensor) -> Tensor:
        """As :meth:`.Oracle.hessian_product`."""
        self.stack.model.module.train()
        like = self.stack.model.vector
        product = self.stack.hessian_product(w.to(like), v.to(like), next(self._next)[0])
        return product + self.training.ridge * v if self.training.ridge else product

    def difference(self, new: Tensor, old: Tensor, *, samples: int) -> Gradient:
        """As :meth:`.Oracle.difference`."""
        pieces = [(next(self._drawn(samples)), 1.0)] if samples else [*self.stack.whole()]
        before = self._gradient(old, pieces)
        after = self._gradient(new, pieces)
        return after._replace(vector=after.vector - before.vector)

    def full_gradient(self, w: Tensor) -> Tensor:
        """As :meth:`.Oracle.full_gradient`."""
        gradient: Tensor = self._gradient(w, self.stack.whole()).vector
        return gradient

    def loss(self, w: Tensor) -> Tensor:
        """As :meth:`.Oracle.loss`; weight decay is left out."""
        return self.stack.loss(w.to(self.stack.model.vector))

    def _gradient(self, w: Tensor, pieces: Iterable[tuple[Batches, Any]]) -> Gradient:
        """Return the gradient, loss and accuracy on mini-batches, each weighted by its share."""
        self.stack.model.module.train()
        w = w.to(self.stack.model.vector)
        vector: Any = 0.0
        loss: Any = 0.0
        accuracy: Any = 0.0
        for batches, share in pieces:
            g, results = self.stack.gradient(w, batches)
            vector = vector + share * g
            loss = loss + share * precise(results.loss)
            if results.right is not None:
                right = results.right * batches.weights.max(1, keepdim=True).values
                accuracy = accuracy + share * precise(right)
        if self.training.ridge:
            vector = vector + self.training.ridge * w
        return Gradient(vector, loss, accuracy if self.stack.classifies else math.nan)

    @functools.cached_property
    def _next(self) -> Feed:
        return Feed(self.stack, self.training, self._streams("meta"))

    def _drawn(self, samples: int) -> Iterator[Batches]:
        if self._draws is None:
            self._draws = self._draw(samples)
        return self._draws

    def _draw(self, samples: int) -> Iterator[Batches]:
        """Yield mini-batches drawn with replacement; several are copied to the device at once."""
        pairs = zip(self.problems, self._streams("oracle"), strict=True)
        blocks = zip(*(problem.drawn(rng, samples) for problem, rng in pairs), strict=True)
        for block in blocks:
            numbers = np.stack(block, 1)
            made = self.stack.batches(numbers, np.full(numbers.shape[:2], samples))
            yield from map(Batches, *made)


class Feed:
    """Endless mini-batches of every client, one epoch after another."""

    def __init__(self, stack: Stack, training: LocalTraining, rngs: Generators) -> None:
        self._stack, self._rngs = stack, rngs
        self._size = batch_size(training) or int(stack.sizes.max())
        self._per_epoch = batches_per_epoch(stack.sizes, training)
        steps = []
        for rng, batches in zip(rngs, self._per_epoch.tolist(), strict=True):
            epochs, limit = planned(training, batches, rng)
            steps.append(limit or epochs * batches)
        self.steps: Numbers = np.array(steps)
        self._all = self._endless()

    def __next__(self) -> tuple[Batches, Numbers]:
        """Return the next mini-batches, and their sizes [clients]."""
        return next(self._all)

    def _endless(self) -> Iterator[tuple[Batches, Numbers]]:
        """Draw as many batches at a time as the longest epoch has, and copy them to the device."""
        sizes, per_epoch = self._stack.sizes, self._per_epoch
        orders: list[list[Numbers]] = [[] for _ in sizes]
        used, turns = np.zeros_like(sizes), np.arange(int(per_epoch.max()))[:, None]
        while True:
            wanted = -(-(used + len(turns)) // per_epoch)
            for rng, order, samples, epochs in zip(
                self._rngs, orders, sizes.tolist(), wanted.tolist(), strict=True
            ):
                order += drawn_orders(rng, samples, self._size, epochs - len(order))
            where = used + turns, np.arange(len(sizes))
            samples, counts = (part[where] for part in laid_out(orders, sizes, self._size))
            placed = self._stack.batches(samples, counts)
            for turn in range(len(turns)):
                yield Batches(placed.samples[turn], placed.weights[turn]), counts[turn]
            done, used = np.divmod(used + len(turns), per_epoch)
            orders = [order[n:] for order, n in zip(orders, done.tolist(), strict=True)]
