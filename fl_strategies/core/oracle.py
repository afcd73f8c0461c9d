"""What a client rule is handed, and what it returns.

A rule knows its client's f only through an *oracle*, which solves subproblems of f (eq. 0 of
``fl_strategies.core.subproblem``) and evaluates f and its derivatives. An oracle returns records of
what it did; a rule puts them into the :class:`Step` that it returns. Neither writes into what it
was given, and the oracle's only memory is which mini-batches and random numbers were used.

Vectors and numbers are those of one client or of a stack (``fl_strategies.core.columns``). Numbers
that come from the loss may still be on the device: scalars (0-d) of double precision, or columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from fl_strategies.core.records import NOTHING
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector


class Gradient(NamedTuple):
    """A gradient, or a difference of gradients, and the mean loss and accuracy on its samples."""

    vector: Vector
    loss: Any = math.nan
    accuracy: Any = math.nan


class Solved(NamedTuple):
    """What a solver came to, and how."""

    w: Vector
    """Where it ended."""
    previous: Vector | None = None
    """The iterate before ``w``, where the solver was started with one."""
    steps: Any = 0
    """Local steps: mini-batches that the optimizer was given."""
    epochs: Any = None
    """Passes over the samples, the last perhaps cut short; None where these are not counted."""
    loss: Any = math.nan
    """Mean loss of f over the last epoch's mini-batches, each before its step."""
    accuracy: Any = math.nan
    """The same of the accuracy; NaN where targets are no classes."""
    residual: Any = math.nan
    """Squared norm of the subproblem's full gradient at ``w``; NaN where it was not measured."""


class Tally(NamedTuple):
    """Sums over several solves or gradients."""

    steps: Any = 0
    epochs: Any = 0
    loss: Any = 0.0
    accuracy: Any = 0.0
    residual: Any = 0.0

    def plus(self, made: Solved | Gradient) -> Tally:
        """Return the sums with one solve or gradient more."""
        solved = made if isinstance(made, Solved) else Solved(made.vector, None, 1, 0, *made[1:])
        return Tally(*(a + b for a, b in zip(self, solved[2:], strict=True)))

    def mean(self, w: Vector, count: Any, **others: Any) -> Solved:
        """Return ``count`` solves or gradients as one: steps and epochs added up, means of the
        rest; ``others`` are fields to set instead."""
        means = (total / count for total in self[2:])
        return Solved(w, None, self.steps, self.epochs, *means)._replace(**others)


class Step(NamedTuple):
    """What a client rule made of a request."""

    upload: Vector
    """The vector to send."""
    state: Any = None
    """What the client keeps for the next round: the algorithm's ``State``, if it has one."""
    scalars: Mapping[str, Any] = NOTHING
    """Numbers to send beside the upload."""
    solved: Solved | None = None
    """What the local work came to, for the round's metrics."""
    beside: Mapping[str, Vector] = NOTHING
    """Further vectors to send, by name."""


class Oracle(Protocol):
    """Access to a client's f, whose samples, solver and mini-batches are the oracle's affair.

    Every vector that is returned is a new one. Weight decay is a term of f.
    """

    @property
    def steps(self) -> Any:
        """How many steps on mini-batches the local settings ask for: their ``steps``, or as many
        as their ``epochs`` have mini-batches; drawn, where they say so."""

    def solve(
        self, start: Vector, subproblem: Subproblem, *, previous: Vector | None = None
    ) -> Solved:
        """Return an approximate minimiser of (0), found from ``start`` as the settings say.

        With ``previous``, the iterate before ``start``, the solver's momentum continues from their
        difference, and the last two iterates are returned.
        """

    def solve_aside(self, start: Vector, subproblem: Subproblem) -> Solved:
        """As :meth:`solve`, for a model that does not travel: what its training does to running
        statistics and random streams of the model is undone."""

    def solve_on_next(self, start: Vector, subproblem: Subproblem, *, steps: Any) -> Solved:
        """As :meth:`solve`, by so many steps on the next mini-batch in the place of f."""

    def gradient(self, w: Vector) -> Gradient:
        """Return the gradient at ``w`` on the next mini-batch."""

    def hessian_product(self, w: Vector, v: Vector) -> Vector:
        """Return the Hessian at ``w`` on the next mini-batch, times ``v``."""

    def difference(self, new: Vector, old: Vector, *, samples: Any) -> Gradient:
        """Return the gradient at ``new`` less that at ``old``, on the same samples.

        These are drawn anew, with replacement (all of them, once, if ``samples`` is 0). Loss and
        accuracy are those at ``new``.
        """

    def full_gradient(self, w: Vector) -> Vector:
        """Return the gradient at ``w`` on all samples; ``ValueError`` where there is no such."""

    def loss(self, w: Vector) -> Any:
        """Return f(w) over all samples, the model in evaluation mode."""
