"""Delta-SGD: each client computes the size of each local step from how fast its gradient changes;
nothing is tuned per client or data set.

Delta-SGD is a local solver, not a strategy, and works with every algorithm that takes a solver. In
each round a client starts anew from eta_0 and theta_0, and with its k-th mini-batch b (k = 0, 1,
...) computes

    moved   = ||x_k - x_{k-1}||,   changed = ||g(x_k; b) - g(x_{k-1}; b)||              (1)
    eta_k   = min(gamma moved / (2 changed), sqrt(1 + delta theta_{k-1}) eta_{k-1})     (2)
    theta_k = eta_k / eta_{k-1}                                                         (3)
    x_{k+1} = x_k - eta_k g(x_k; b)                                                     (4)

where the first step takes eta_0 and theta_0 as they are.

x_k     the point of step k [d]; norms run over all of it
g(.; b) gradient, on mini-batch b, of the function that the algorithm's clients minimise
eta_k   step size; moved / changed is the inverse of the curvature along the last step
theta_k factor by which the step size grew
gamma   share of that inverse curvature, > 0 (paper's experiments: 2)
delta   growth, >= 0 (paper's experiments, by its Appendix B.1: 0.1; its Algorithm 1: 1)

Both gradients of (1) are on the current mini-batch, so a step costs two gradients. If ``moved`` or
``changed`` is 0, no curvature is known, and (2) takes its second term.

Options, off by default. With ``same_batch=False`` each gradient of (1) is on the mini-batch of its
own step, which costs one gradient a step and a vector of memory; the paper names this form and does
not use it. ``Options.authors_rule`` is the authors' published code: its first step has x_{-1} =
x_0, so that (2) grows eta_0 before the first step (``amplify_first``); it adds 1e-8 to every step
size (``epsilon``); and it has delta = 0.02. ``Options.paper_rule`` are the options of the paper's
experiments, and the defaults.

Reference: Kim, Toghani, Uribe, Kyrillidis, "Adaptive Federated Learning with Auto-Tuned Clients",
ICLR 2024, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from fl_strategies.core.schedules import check, check_flag
from fl_strategies.core.stacks import norm
from fl_strategies.core.vectors import Vector


@dataclass(frozen=True)
class Options:
    """The options of ``clients.DeltaSGD``, by default the paper's.

    ``paper_rule`` and ``authors_rule`` are those of the paper and of its authors' code, for
    ``clients.DeltaSGD`` and, as text, for ``solver-params``. Raises ``ValueError`` for an option
    outside its range.
    """

    paper_rule: ClassVar[Mapping[str, Any]] = MappingProxyType({"gamma": 2.0, "delta": 0.1})
    authors_rule: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {**paper_rule, "delta": 0.02, "amplify_first": True, "epsilon": 1e-8}
    )

    lr: float = 0.2
    gamma: float = 2.0
    delta: float = 0.1
    theta_0: float = 1.0
    epsilon: float = 0.0
    amplify_first: bool = False
    same_batch: bool = True
    same_masks: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "gamma", "theta_0"):
            check(name, getattr(self, name), above=0.0)
        for name in ("delta", "epsilon"):
            check(name, getattr(self, name), low=0.0)
        for name in ("amplify_first", "same_batch", "same_masks"):
            check_flag(name, getattr(self, name))


class State(NamedTuple):
    """What the next step needs: x_{k-1} and its gradient (None at first), eta, theta.

    eta and theta are numbers, or columns for a stack.
    """

    x: Vector | None
    g: Vector | None
    eta: Vector | float
    theta: Vector | float


def first_state(*, eta_0: float, theta_0: float) -> State:
    """Return the state before the first step of a round."""
    return State(None, None, eta_0, theta_0)


def step_size(
    moved: Vector,
    changed: Vector,
    eta: Vector | float,
    theta: Vector | float,
    *,
    gamma: float,
    delta: float,
    epsilon: float = 0.0,
) -> tuple[Vector, Vector]:
    """Return eta_k and theta_k by (2) and (3); ``moved`` and ``changed`` are numbers >= 0, as NumPy
    or torch has them, or columns."""
    grown = (1.0 + delta * theta) ** 0.5 * eta
    # min(a, b) = b / max(1, b/a), where 1/a may be 0: nothing changed, or nothing moved
    curvature = 2.0 * changed * (moved > 0.0) / (gamma * (moved + (moved == 0.0)))
    new = grown / (grown * curvature).clip(min=1.0) + epsilon
    return new, new / eta


def step(
    state: State,
    x: Vector,
    g: Vector,
    g_before: Vector | None,
    *,
    gamma: float,
    delta: float,
    epsilon: float = 0.0,
    amplify_first: bool = False,
) -> tuple[State, Vector]:
    """Return the next state and point, by (1)-(4).

    ``x`` = x_k and its gradient ``g`` are [d], or [clients, d] for a stack whose clients have a
    step size each. ``g_before`` is the gradient at x_{k-1} = ``state.x``: on the same mini-batch,
    or ``state.g`` with ``same_batch=False``. It is not used in the first step.
    """
    eta, theta, first = state.eta, state.theta, state.x is None
    if amplify_first or not first:
        moved = norm(x - (x if first else state.x))
        changed = norm(g - (g if first else g_before))
        eta, theta = step_size(
            moved, changed, eta, theta, gamma=gamma, delta=delta, epsilon=epsilon
        )
    return State(x, g, eta, theta), x - eta * g
