"""SPS: stochastic gradient descent with Polyak's step size.

SPS is a local solver, not a strategy, and works with every algorithm that takes a solver. With the
loss f and gradient g of the k-th mini-batch at x_k (k = 0, 1, ...),

    eta_k   = (f - f*) / (c ||g||^2)                                            (1)
    eta_k   <- min(eta_k, growth^(b/n) eta_{k-1}, max_step)                     (2)
    x_{k+1} = x_k - eta_k g                                                     (3)

f*      lower bound of the losses of all batches (0 for a loss that cannot be negative)
c       > 0: 1 is Polyak's own step, with f* the least value of f; the paper has 1/2
growth  how much the step size may grow in an epoch, >= 1 (the authors' code: 2); 0 for no limit
b/n     share of the samples in a batch
eta_-1  the step size from which the first one may grow
max_step  the paper's gamma_b, > 0; 0 for no limit

On a mini-batch with f <= f* or g = 0 no step is taken, and the next step size may grow from
eta_{k-1}. (In the authors' code no step follows such a mini-batch: a limit of 0 cannot grow.) The
Delta-SGD paper compares with (1) without (2): growth = max_step = 0.

Reference: Loizou, Vaswani, Laradji, Lacoste-Julien, "Stochastic Polyak Step-size for SGD: An
Adaptive Learning Rate for Fast Convergence", AISTATS 2021, equation (3) and Section 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fl_strategies.core.schedules import check
from fl_strategies.core.stacks import norm
from fl_strategies.core.vectors import Vector


@dataclass(frozen=True)
class Options:
    """The options of ``clients.SPS``, by default the authors'.

    Raises ``ValueError`` for an option outside its range.
    """

    lr: float = 1.0
    c: float = 0.5
    f_star: float = 0.0
    growth: float = 2.0
    batch_share: float = 1.0
    max_step: float = 0.0

    def __post_init__(self) -> None:
        check("lr", self.lr, above=0.0)
        check("c", self.c, above=0.0)
        check("f_star", self.f_star)
        if self.growth != 0.0:
            check("growth (0: no limit)", self.growth, low=1.0)
        check("batch_share", self.batch_share, above=0.0, high=1.0)
        check("max_step", self.max_step, low=0.0)


class State(NamedTuple):
    """What the next step needs: eta_{k-1}, a number or a column."""

    eta: Vector | float


def step_size(
    loss: Vector,
    square: Vector,
    eta: Vector | float,
    *,
    c: float,
    f_star: float,
    growth: float,
    batch_share: Vector | float,
    max_step: float,
) -> tuple[Vector, Vector]:
    """Return eta_k by (1) and (2), 0 if no step is taken, and the one from which the next may grow.

    ``loss`` and ``square`` = ||g||^2 are numbers, as NumPy or torch has them, or columns.
    """
    steps = (loss > f_star) & (square > 0.0)
    new = (loss - f_star) / (c * (square + (square == 0.0)))
    if growth:
        new = new.clip(max=growth**batch_share * eta)
    if max_step:
        new = new.clip(max=max_step)
    last = eta + 0.0 * square  # as an array: a bool times a number would be of single precision
    return steps * new, steps * new + ~steps * last


def step(
    state: State,
    x: Vector,
    loss: Vector,
    g: Vector,
    *,
    c: float,
    f_star: float,
    growth: float,
    batch_share: Vector | float,
    max_step: float,
) -> tuple[State, Vector]:
    """Return the next state and point, by (1)-(3).

    ``x`` and its gradient ``g`` are [d], and ``loss`` is a number; for a stack they are
    [clients, d], and a column.
    """
    eta, last = step_size(
        loss,
        norm(g) ** 2,
        state.eta,
        c=c,
        f_star=f_star,
        growth=growth,
        batch_share=batch_share,
        max_step=max_step,
    )
    return State(last), x - eta * g
