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
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from fl_strategies.core.records import NOTHING
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Number, Vector

Part: TypeAlias = Literal["shared", "own"]
"""Of the trained arrays those that travel, which are the vector [d], or each client's own."""


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
    weight: Number = math.nan
    """a, the sum of the weights with which the steps add gradients: how far they go on a gradient
    of 1, in units of the learning rate (of a schedule, its first value). NaN if it was not asked
    for, or differs between parameters."""
    rates: Vector | Number = math.nan
    """A, a times the learning rate, a number or [d]: start - w is A times a mean of gradients.
    Infinite for a parameter that no step moves. NaN if it was not asked for."""
    metrics: Mapping[str, Any] = NOTHING
    """What the training loop reports in addition."""


def both(first: Number, second: Number) -> Number:
    """Return the sum of two solves' epochs: None if they are not counted."""
    return None if first is None or second is None else first + second


class Tally(NamedTuple):
    """Sums over several solves or gradients.

    Examples
    --------
    >>> import numpy as np
    >>> found = [Gradient(np.ones(2), loss=1.0), Gradient(np.ones(2), loss=3.0)]
    >>> Tally().plus(found[0]).plus(found[1]).mean(np.zeros(2), 2).loss
    2.0
    """

    steps: Number = 0
    epochs: Number = 0
    loss: Number = 0.0
    accuracy: Number = 0.0
    residual: Number = 0.0

    def plus(self, made: Solved | Gradient) -> Tally:
        """Return the sums including one more solve or gradient."""
        solved = made if isinstance(made, Solved) else Solved(made.vector, None, 1, 0, *made[1:])
        return Tally(*(both(a, getattr(solved, name)) for name, a in self._asdict().items()))

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


class Solver(Protocol):
    """What solves subproblems of f."""

    def solve(self, start: Vector, subproblem: Subproblem) -> Solved:
        """Return an approximate minimiser of (0), computed from ``start`` as the settings say."""


class Idle:
    """The solver of no arrays."""

    def solve(self, start: Vector, subproblem: Subproblem) -> Solved:
        """Return the start."""
        return Solved(start, epochs=0)


class Oracle(Protocol):
    """Access to a client's f; the oracle takes care of samples, solver and mini-batches.

    Every returned vector is a new one. Weight decay is a term of f.
    """

    @property
    def steps(self) -> Number:
        """How many steps on mini-batches the local settings ask for: ``steps``, or the number of
        mini-batches in ``epochs``; drawn at random, if the settings say so."""

    @property
    def counts_steps(self) -> bool:
        """Whether the local settings count work in ``steps``; else they count epochs."""

    @property
    def rate(self) -> float:
        """The learning rate of the local settings, for a rule with steps of its own."""

    def solve(
        self,
        start: Vector,
        subproblem: Subproblem,
        *,
        previous: Vector | None = None,
        rates: bool = False,
        until: float | None = None,
    ) -> Solved:
        """Return an approximate minimiser of (0), computed from ``start`` as the settings say.

        With ``previous``, the iterate before ``start``, the solver's momentum continues from their
        difference, and the last two iterates are returned. With ``rates`` the result has ``weight``
        and ``rates``; ``ValueError`` where they are not known, as of adaptive solvers. With
        ``until``, work also ends after the first epoch at whose end the norm of the full gradient
        of (0) is at most ``until`` times the norm at ``start``.
        """

    def solve_aside(self, start: Vector, subproblem: Subproblem) -> Solved:
        """As :meth:`solve`, for a model that does not travel: changes of the model's running
        statistics and random streams are undone."""

    def only(self, part: Part, *, epochs: int = 0) -> Solver:
        """Return what solves with one part of the arrays, while the others are fixed.

        Slope and pull apply to shared arrays alone. ``epochs`` are taken instead of what the
        settings say, if any. Clients without arrays of their own take no step on "own".
        """

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
