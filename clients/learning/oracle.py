"""A client's oracle (``fl_strategies.core.oracle``): its problem, solver and random streams."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clients.learning.data import Batch, fixed_samples
from clients.learning.loop import Measured, planned, solve
from clients.learning.problem import Problem, into_training
from clients.learning.replay import without_trace
from fl_strategies.core.oracle import Gradient, Idle, Part, Solved, Solver
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.solvers.gradient_weights import check_weights_known
from fl_strategies.solvers.local import LocalTraining

NOT_KNOWN = "the algorithm needs to know what local steps add up to"


class MiniBatches(NamedTuple):
    """Endless mini-batches, one epoch after another, and the number of steps to take on them."""

    steps: int
    batches: Iterator[Batch]
    rng: np.random.Generator


class ByTraining:
    """What local settings say to a rule that asks."""

    training: LocalTraining

    @property
    def counts_steps(self) -> bool:
        """As :attr:`.Oracle.counts_steps`."""
        return self.training.steps > 0

    @property
    def rate(self) -> float:
        """As :attr:`.Oracle.rate`."""
        return self.training.rate


class ClientOracle(ByTraining):
    """The oracle of the client whose f is that of ``problem``, weight decay included.

    Parameters
    ----------
    problem : Problem
        f without weight decay. Training changes its model's parameters.
    training : LocalTraining
        How subproblems are solved, and the size of mini-batches.
    rng : numpy.random.Generator
        The generator of ``solve``.
    stream : callable
        ``stream(purpose)`` returns the client's generator of that purpose: "meta" for the
        mini-batches of derivatives, "oracle" for the samples of differences.
    climb : Tensor, optional
        Where gradients of ``solve`` are taken from w [d] (:func:`clients.learning.sam.climb_of`).
    asked_by : str
        The beginning of an error's text, "fedpd asks its clients".
    """

    def __init__(
        self,
        problem: Problem,
        training: LocalTraining,
        rng: np.random.Generator,
        stream: Callable[[str], np.random.Generator],
        *,
        climb: Tensor | None = None,
        asked_by: str = "the algorithm asks a client",
    ) -> None:
        self.problem, self.training, self._climb = problem, training, climb
        self._rng, self._stream, self._asked_by = rng, stream, asked_by
        self._draws: Iterator[Batch] | None = None

    def on(self, make: Callable[..., Problem], *args: Any, **options: Any) -> ClientOracle:
        """Return the oracle of the loss that ``make(problem, *args, **options)`` makes of f.

        Call it before the first use.
        """
        other = copy.copy(self)
        other.problem = make(self.problem, *args, **options)
        return other

    def only(self, part: Part, *, epochs: int = 0) -> Solver:
        """As :meth:`.Oracle.only`."""
        model = self.problem.model.only(part)
        if not model.trained:
            return Idle()
        other = copy.copy(self)
        other.problem = self.problem.with_roles_of(model)
        if epochs:
            other.training = for_epochs(self.training, epochs)
        return other

    @property
    def steps(self) -> int:
        """As :attr:`.Oracle.steps`."""
        return self._next.steps

    def solve(
        self,
        start: Tensor,
        subproblem: Subproblem,
        *,
        previous: Tensor | None = None,
        rates: bool = False,
        until: float | None = None,
    ) -> Solved:
        """As :meth:`.Oracle.solve`."""
        if rates:
            check_weights_known(self.training.settings, NOT_KNOWN)
        with self.problem.model.fixing():
            return solve(
                self.problem,
                start,
                subproblem,
                self.training,
                self._rng,
                previous=previous,
                rates=rates,
                until=until,
                climb=self._climb,
            )

    def solve_aside(self, start: Tensor, subproblem: Subproblem) -> Solved:
        """As :meth:`.Oracle.solve_aside`."""
        model = self.problem.model
        values = [parameter.detach().clone() for parameter in model.own]
        with without_trace(model.shared[:1], model.module):
            solved = self.solve(start, subproblem)
        with torch.no_grad():
            for parameter, value in zip(model.own, values, strict=True):
                parameter.copy_(value)
        return solved

    def solve_on_next(self, start: Tensor, subproblem: Subproblem, *, steps: int) -> Solved:
        """As :meth:`.Oracle.solve_on_next`."""
        batch = self.problem.on(next(self._next.batches))
        training = on_all(self.training, steps)
        return solve(batch, start, subproblem, training, self._next.rng)

    def gradient(self, w: Tensor) -> Gradient:
        """As :meth:`.Oracle.gradient`; the accuracy is not measured."""
        self._needs_all()
        loss, _ = self._gradient(w, next(self._next.batches))
        return Gradient(self._decayed(w), loss)

    def hessian_product(self, w: Tensor, v: Tensor) -> Tensor:
        """As :meth:`.Oracle.hessian_product`."""
        self._move(w)
        product = self.problem.hessian_product(next(self._next.batches), v)
        return product + self.training.ridge * v if self.training.ridge else product

    def difference(self, new: Tensor, old: Tensor, *, samples: int) -> Gradient:
        """As :meth:`.Oracle.difference`; both gradients see the same dropout masks."""
        self._needs_all()
        problem, model = self.problem, self.problem.model
        batch = next(self._drawn(samples)) if samples else problem.data.whole
        with without_trace(model.shared[:1], model.module):
            self._gradient(old, batch.copy())
        before = self._decayed(old)
        measured = Measured(problem)
        measured.add(*self._gradient(new, batch), batch)
        return Gradient(self._decayed(new) - before, *measured.means)

    def full_gradient(self, w: Tensor) -> Tensor:
        """As :meth:`.Oracle.full_gradient`."""
        self._move(w)
        with fixed_samples(f"{self._asked_by} for a full gradient"):
            self.problem.full_gradient()
        return self._decayed(w)

    def loss(self, w: Tensor) -> float:
        """As :meth:`.Oracle.loss`; weight decay is left out."""
        self.problem.model.write(w)
        return self.problem.evaluate().loss

    @functools.cached_property
    def _next(self) -> MiniBatches:
        problem, training, rng = self.problem, self.training, self._stream("meta")
        per_epoch = problem.data.per_epoch(training)
        epochs, limit = planned(training, per_epoch, rng)
        size = 0 if training.full_batch else training.batch_size
        without_end = (problem.data.batches(rng, size) for _ in itertools.count())
        return MiniBatches(
            limit or epochs * per_epoch,
            itertools.chain.from_iterable(without_end),
            rng,
        )

    def _drawn(self, samples: int) -> Iterator[Batch]:
        if self._draws is None:
            self._draws = self.problem.data.draws(self._stream("oracle"), samples)
        return self._draws

    def _needs_all(self) -> None:
        """Raise ``ValueError`` if the rule's own steps would leave trained arrays untrained."""
        model = self.problem.model
        if model.own:
            raise ValueError(
                f"{self._asked_by} for gradients, to take steps of its own, which do not train the"
                f" arrays that do not travel, {[*model.kept[:3]]}: share them"
            )

    def _move(self, w: Tensor) -> None:
        self.problem.model.write(w)
        into_training(self.problem.model.module)

    def _gradient(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        self._move(w)
        return self.problem.gradient(batch)

    def _decayed(self, w: Tensor) -> Tensor:
        """Return the gradient that the problem left in the parameters, plus weight decay at w."""
        gradient = self.problem.model.gradient
        return gradient + self.training.ridge * w if self.training.ridge else gradient


@functools.lru_cache(maxsize=64)
def on_all(training: LocalTraining, steps: int) -> LocalTraining:
    """Return the settings for ``steps`` steps, each on the full batch."""
    return replace(for_epochs(training, steps), batch_size=0, variance_reduction="off")


@functools.lru_cache(maxsize=64)
def for_epochs(training: LocalTraining, epochs: int) -> LocalTraining:
    """Return the settings for so many epochs."""
    return replace(training, epochs=epochs, random_epochs=False, steps=0, random_steps=False)
