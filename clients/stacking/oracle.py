"""The oracle of a stack of clients (``fl_strategies.core.oracle``).

Every client gets what it would get if it trained alone: its mini-batches are drawn from its own
streams, in the same order. Vectors are [clients, d], and numbers that differ between clients are
columns [clients, 1].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from clients.learning.loop import precise
from clients.learning.oracle import NOT_KNOWN, ByTraining, on_all
from clients.learning.problem import Problem, into_training
from clients.stacking.batches import Feed, Generators, Plan, column
from clients.stacking.solve import solve
from clients.stacking.stack import Batches, Stack
from fl_strategies.core.oracle import Gradient, Idle, Part, Solved, Solver
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers.gradient_weights import check_weights_known, weight_of
from fl_strategies.solvers.local import LocalTraining


class StackOracle(ByTraining):
    """The oracle of clients whose f_i are those of ``problems``, weight decay included.

    Parameters
    ----------
    problems : sequence of Problem
        All have one model, loss and penalty, and ``stackable.obstacle`` has nothing against them.
    training : LocalTraining
        How all clients solve their subproblems; its solver is one of ``stackable.SOLVERS``.
    rngs : sequence of numpy.random.Generator
        The generator of each client's ``solve``.
    streams : callable
        ``streams(purpose)`` returns each client's generator of that purpose.
    samples_at_once : int
        As of :class:`.Stack`.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        training: LocalTraining,
        rngs: Generators,
        streams: Callable[[str], Generators],
        *,
        samples_at_once: int = 1 << 20,
    ) -> None:
        self.problems, self.training = problems, training
        self.stack = Stack(problems, samples_at_once=samples_at_once)
        self._rngs, self._streams = rngs, streams
        self._draws: Iterator[Batches] | None = None

    @property
    def steps(self) -> Any:
        """As :attr:`.Oracle.steps`."""
        return column(self._next.steps, self.stack.model.device)

    def solve(
        self,
        start: Tensor,
        subproblem: Subproblem,
        *,
        previous: Tensor | None = None,
        rates: bool = False,
    ) -> Solved:
        """As :meth:`.Oracle.solve`."""
        training = self.training
        if rates:
            check_weights_known(training.settings, NOT_KNOWN)
        solved = solve(self.stack, start, subproblem, training, self._rngs, previous=previous)
        if not rates:
            return solved
        weight = weight_of(
            solved.steps,
            momentum=training.momentum,
            nesterov=training.nesterov,
            pull=training.rate * subproblem.pull,
        )
        return solved._replace(weight=weight, rates=weight * training.rate)

    def solve_aside(self, start: Tensor, subproblem: Subproblem) -> Solved:
        """As :meth:`.Oracle.solve_aside`: stacked models have no running statistics."""
        return self.solve(start, subproblem)

    def only(self, part: Part, *, epochs: int = 0) -> Solver:
        """As :meth:`.Oracle.only`: stacked clients have no arrays of their own."""
        return self if self.stack.model.only(part).trained else Idle()

    def solve_on_next(self, start: Tensor, subproblem: Subproblem, *, steps: Any) -> Solved:
        """As :meth:`.Oracle.solve_on_next`."""
        batches, sizes = next(self._next)
        counts = np.ravel(np.asarray(steps)).astype(np.int64) * np.ones_like(sizes)
        each = Batches(*(part[None] for part in batches))
        work = Plan(each, sizes[None], counts, np.ones_like(sizes), counts)
        training = on_all(self.training, int(counts.max()))
        return solve(self.stack, start, subproblem, training, self._rngs, work=work)

    def gradient(self, w: Tensor) -> Gradient:
        """As :meth:`.Oracle.gradient`; the accuracy is not measured."""
        return self._gradient(w, [(next(self._next)[0], 1.0)])._replace(accuracy=math.nan)

    def hessian_product(self, w: Tensor, v: Tensor) -> Tensor:
        """As :meth:`.Oracle.hessian_product`."""
        into_training(self.stack.model.module)
        like = self.stack.model.like
        product = self.stack.hessian_product(w.to(like), v.to(like), next(self._next)[0])
        return product + self.training.ridge * v if self.training.ridge else product

    def difference(self, new: Tensor, old: Tensor, *, samples: int) -> Gradient:
        """As :meth:`.Oracle.difference`."""
        pieces = [(next(self._drawn(samples)), 1.0)] if samples else [*self.stack.whole()]
        before, after = self._gradient(old, pieces), self._gradient(new, pieces)
        return after._replace(vector=after.vector - before.vector)

    def full_gradient(self, w: Tensor) -> Tensor:
        """As :meth:`.Oracle.full_gradient`."""
        gradient: Tensor = self._gradient(w, self.stack.whole()).vector
        return gradient

    def loss(self, w: Tensor) -> Tensor:
        """As :meth:`.Oracle.loss`; weight decay is left out."""
        return self.stack.loss(w.to(self.stack.model.like))

    def _gradient(self, w: Tensor, pieces: Iterable[tuple[Batches, Any]]) -> Gradient:
        """Return the gradient, loss and accuracy on mini-batches, each weighted by its share."""
        into_training(self.stack.model.module)
        w = w.to(self.stack.model.like)
        vector, loss, accuracy = (self.training.ridge * w if self.training.ridge else 0.0), 0.0, 0.0
        for batches, share in pieces:
            g, results = self.stack.gradient(w, batches)
            vector = vector + share * g
            loss = loss + share * precise(results.loss)[:, None]
            if results.right is not None:
                right = results.right * batches.weights.amax(1)
                accuracy = accuracy + share * precise(right)[:, None]
        return Gradient(vector, loss, accuracy if self.stack.classifies else math.nan)

    @functools.cached_property
    def _next(self) -> Feed:
        return Feed(self.stack, self.training, self._streams("meta"))

    def _drawn(self, samples: int) -> Iterator[Batches]:
        self._draws = self._draws or self._draw(samples)
        return self._draws

    def _draw(self, samples: int) -> Iterator[Batches]:
        """Yield mini-batches drawn with replacement; several are copied to the device at once."""
        pairs = zip(self.problems, self._streams("oracle"), strict=True)
        blocks = zip(*(problem.tensors.drawn(rng, samples) for problem, rng in pairs), strict=True)
        for block in blocks:
            numbers = np.stack(block, 1)
            made = self.stack.batches(numbers, np.full(numbers.shape[:2], samples))
            yield from map(Batches, *made)
