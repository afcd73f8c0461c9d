"""The arguments and the result of a client rule.

A rule knows its client's f only through an *oracle*, which solves subproblems of f (eq. 0 of
``fl_strategies.core.subproblem``) and evaluates f and its derivatives. An oracle returns records of
its work; a rule puts them into the :class:`Step` that it returns. Neither writes into its
arguments, and the oracle remembers only which mini-batches and random numbers were used.

Vectors and numbers are those of one client or of a stack (``fl_strategies.core.stacks``). Numbers
that come from the loss may still be on the device: scalars (0-d) of double precision, or columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from fl_strategies.core.records import NOTHING
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Number, Vector


class Gradient(NamedTuple):
    """A gradient, or a difference of gradients, and the mean loss and accuracy on its samples."""

    vector: Vector
    loss: Number = math.nan
    accuracy: Number = math.nan


class Solved(NamedTuple):
    """The result of a solver, and the work it took."""

    w: Vector
    """The last iterate."""
    previous: Vector | None = None
    """The iterate before ``w``, if the solver was started with a previous iterate."""
    steps: Number = 0
    """Local steps: mini-batches that the optimizer used."""
    epochs: Number = None
    """Passes over the samples, the last perhaps incomplete; None if they are not counted."""
    loss: Number = math.nan
    """Mean loss of f over the last epoch's mini-batches, each measured before its step."""
    accuracy: Number = math.nan
    """Mean accuracy, likewise; NaN where targets are not classes."""
    residual: Number = math.nan
    """Squared norm of the subproblem's full gradient at ``w``; NaN if it was not measured."""


class Tally(NamedTuple):
    """Sums over several solves or gradients."""

    steps: Number = 0
    epochs: Number = 0
    loss: Number = 0.0
    accuracy: Number = 0.0
    residual: Number = 0.0

    def plus(self, made: Solved | Gradient) -> Tally:
        """Return the sums including one more solve or gradient."""
        solved = made if isinstance(made, Solved) else Solved(made.vector, None, 1, 0, *made[1:])
        return Tally(*(a + b for a, b in zip(self, solved[2:], strict=True)))

    def mean(self, w: Vector, count: Number, **others: Any) -> Solved:
        """Return ``count`` solves or gradients as one: the sum of steps and epochs, and means of
        the rest; ``others`` are fields to set instead."""
        means = (total / count for total in self[2:])
        return Solved(w, None, self.steps, self.epochs, *means)._replace(**others)


class Step(NamedTuple):
    """The result of a client rule."""

    upload: Vector
    """The vector [d] to send."""
    state: Any = None
    """What the client keeps for the next round: the algorithm's ``State``, if it has one."""
    scalars: Mapping[str, Number] = NOTHING
    """Numbers to send with the upload."""
    solved: Solved | None = None
    """The local work, for the round's metrics."""
    extra_vectors: Mapping[str, Vector] = NOTHING
    """Further vectors to send, by name."""


class Oracle(Protocol):
    """Access to a client's f; the oracle takes care of samples, solver and mini-batches.

    Every returned vector is a new one. Weight decay is a term of f.
    """

    @property
    def steps(self) -> Number:
        """How many steps on mini-batches the local settings ask for: ``steps``, or the number of
        mini-batches in ``epochs``; drawn at random, if the settings say so."""

    def solve(
        self, start: Vector, subproblem: Subproblem, *, previous: Vector | None = None
    ) -> Solved:
        """Return an approximate minimiser of (0), computed from ``start`` as the settings say.

        With ``previous``, the iterate before ``start``, the solver's momentum continues from their
        difference, and the last two iterates are returned.
        """

    def solve_aside(self, start: Vector, subproblem: Subproblem) -> Solved:
        """As :meth:`solve`, for a model that does not travel: changes of the model's running
        statistics and random streams are undone."""

    def solve_on_next(self, start: Vector, subproblem: Subproblem, *, steps: Number) -> Solved:
        """As :meth:`solve`, by ``steps`` steps, with the loss on the next mini-batch for f."""

    def gradient(self, w: Vector) -> Gradient:
        """Return the gradient at ``w`` on the next mini-batch."""

    def hessian_product(self, w: Vector, v: Vector) -> Vector:
        """Return the Hessian at ``w`` on the next mini-batch, times ``v``."""

    def difference(self, new: Vector, old: Vector, *, samples: Number) -> Gradient:
        """Return the gradient at ``new`` minus the gradient at ``old``, on the same samples.

        The samples are drawn anew, with replacement; with ``samples`` 0 they are all samples. Loss
        and accuracy are those at ``new``.
        """

    def full_gradient(self, w: Vector) -> Vector:
        """Return the gradient at ``w`` on all samples; ``ValueError`` if it does not exist."""

    def loss(self, w: Vector) -> Number:
        """Return f(w) over all samples, the model in evaluation mode."""
