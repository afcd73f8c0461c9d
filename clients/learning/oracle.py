"""A client's oracle (``fl_strategies.core.oracle``): its problem, solver and random streams."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from clients.learning.drawn import fixed_samples
from clients.learning.objective import Objective
from clients.learning.passes import Batch, Inputs
from clients.learning.replay import without_trace
from clients.learning.solvers import measured, planned, solve
from fl_strategies.core.oracle import Gradient, Solved
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers.local import LocalTraining


class MiniBatches(NamedTuple):
    """Endless mini-batches, one epoch after another, and the number of steps to take on them."""

    steps: int
    batches: Iterator[Batch]
    rng: np.random.Generator


class ClientOracle:
    """The oracle of the client whose f is that of ``problem``, weight decay included.

    Parameters
    ----------
    problem : Objective
        f without weight decay. Training changes its model's parameters.
    training : LocalTraining
        How subproblems are solved, and the size of mini-batches.
    rng : numpy.random.Generator
        The generator of ``solve``.
    stream : callable
        ``stream(purpose)`` returns the client's generator of that purpose: "meta" for the
        mini-batches of derivatives, "oracle" for the samples of differences.
    asked_by : str
        The beginning of an error's text, "fedpd asks client 4".
    """

    def __init__(
        self,
        problem: Objective,
        training: LocalTraining,
        rng: np.random.Generator,
        stream: Callable[[str], np.random.Generator],
        *,
        asked_by: str = "the algorithm asks a client",
    ) -> None:
        self.problem, self.training = problem, training
        self._rng, self._stream, self._asked_by = rng, stream, asked_by
        self._draws: Iterator[Batch] | None = None

    def on(self, make: Callable[..., Objective], *args: Any, **options: Any) -> ClientOracle:
        """Return the oracle of the loss that ``make(problem, *args, **options)`` makes of f.

        Call it before the first use.
        """
        other = copy.copy(self)
        other.problem = make(self.problem, *args, **options)
        return other

    @property
    def steps(self) -> int:
        """As :attr:`.Oracle.steps`."""
        return self._next.steps

    def solve(
        self, start: Tensor, subproblem: Subproblem, *, previous: Tensor | None = None
    ) -> Solved:
        """As :meth:`.Oracle.solve`."""
        return solve(self.problem, start, subproblem, self.training, self._rng, previous=previous)

    def solve_aside(self, start: Tensor, subproblem: Subproblem) -> Solved:
        """As :meth:`.Oracle.solve_aside`."""
        model = self.problem.model
        own = model.trained[len(model.vector) :].clone()
        with without_trace([model.vector], model.module):
            solved = self.solve(start, subproblem)
        model.trained[len(model.vector) :] = own
        return solved

    def solve_on_next(self, start: Tensor, subproblem: Subproblem, *, steps: int) -> Solved:
        """As :meth:`.Oracle.solve_on_next`."""
        batch = self.problem.on(*next(self._next.batches))
        training = on_all(self.training, steps)
        return solve(batch, start, subproblem, training, self._next.rng)

    def gradient(self, w: Tensor) -> Gradient:
        """As :meth:`.Oracle.gradient`; the accuracy is not measured."""
        self._needs_all()
        loss, _ = self._gradient(w, *next(self._next.batches))
        return Gradient(self._decayed(w), loss)

    def hessian_product(self, w: Tensor, v: Tensor) -> Tensor:
        """As :meth:`.Oracle.hessian_product`."""
        self._move(w)
        product = self.problem.hessian_product(*next(self._next.batches), v)
        return product + self.training.ridge * v if self.training.ridge else product

    def difference(self, new: Tensor, old: Tensor, *, samples: int) -> Gradient:
        """As :meth:`.Oracle.difference`; both gradients see the same dropout masks."""
        self._needs_all()
        problem, model = self.problem, self.problem.model
        inputs, targets = next(self._drawn(samples)) if samples else problem.whole
        with without_trace([model.vector], model.module):
            self._gradient(old, inputs, targets)
        before = self._decayed(old)
        loss, outputs = self._gradient(new, inputs, targets)
        came_to = measured(problem, [(loss, outputs, targets)])
        return Gradient(self._decayed(new) - before, *came_to)

    def full_gradient(self, w: Tensor) -> Tensor:
        """As :meth:`.Oracle.full_gradient`."""
        self._move(w)
        with fixed_samples(f"{self._asked_by} for a full gradient"):
            self.problem.full_gradient()
        return self._decayed(w)

    def loss(self, w: Tensor) -> float:
        """As :meth:`.Oracle.loss`; weight decay is left out."""
        self.problem.model.vector.copy_(w)
        return self.problem.evaluate().loss

    @functools.cached_property
    def _next(self) -> MiniBatches:
        problem, training, rng = self.problem, self.training, self._stream("meta")
        per_epoch = problem.planned(training)
        epochs, limit = planned(training, per_epoch, rng)
        size = 0 if training.full_batch else training.batch_size
        without_end = (problem.batches(rng, size) for _ in itertools.count())
        return MiniBatches(
            limit or epochs * per_epoch,
            itertools.chain.from_iterable(without_end),
            rng,
        )

    def _drawn(self, samples: int) -> Iterator[Batch]:
        if self._draws is None:
            self._draws = self.problem.draws(self._stream("oracle"), samples)
        return self._draws

    def _needs_all(self) -> None:
        """Raise ``ValueError`` if the rule's own steps would leave trained arrays untrained."""
        model = self.problem.model
        if len(model.trained) > len(model.vector):
            raise ValueError(
                f"{self._asked_by} for gradients, to take steps of its own, which do not train the"
                f" arrays that do not travel, {[*model.kept[:3]]}: share them"
            )

    def _move(self, w: Tensor) -> None:
        self.problem.model.vector.copy_(w)
        self.problem.model.module.train()

    def _gradient(self, w: Tensor, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        self._move(w)
        return self.problem.gradient(inputs, targets)

    def _decayed(self, w: Tensor) -> Tensor:
        """Return the gradient that the problem left in the model, plus weight decay at w."""
        gradient = self.problem.model.gradient
        return gradient + self.training.ridge * w if self.training.ridge else gradient.clone()


@functools.lru_cache(maxsize=64)
def on_all(training: LocalTraining, steps: int) -> LocalTraining:
    """Return the settings for ``steps`` steps, each on the full batch."""
    return replace(
        training,
        epochs=steps,
        random_epochs=False,
        steps=0,
        random_steps=False,
        batch_size=0,
        variance_reduction="off",
    )
