"""The constraint ||x_i - z||^2 <= gamma_i and its scalar dual variable, for FedBC and Per-FedBC.

After the local work that turned client i's model into x+, near the model z that it received:

    lambda+ = clip(lambda + alpha (||x+ - z||^2 - gamma), lambda_min, lambda_max)     (a)
    gamma+  = gamma + alpha_gamma lambda                                              (b)
    z <- sum_i lambda+_i x+_i / sum_i lambda+_i, the plain mean if the sum is 0       (c)

lambda  dual variable and weight of a client, at first 0 clipped into [lambda_min, lambda_max]; with
        lambda_min = lambda_max = c it stays at c
gamma   squared distance that is allowed: at first 0, then by the heuristic (b); or a fixed number
alpha, alpha_gamma
        step sizes of (a) and of (b)

The heuristic never lowers gamma: where the distance stays bounded, gamma passes it in the end and
lambda comes down to lambda_min for good. It is a schedule that loosens the constraint, not an
estimate of the distance.

Authors' dual optimiser (``dual_momentum`` = m, theirs 0.5; 0 is the paper's rule). One SGD holds
the lambda and gamma of all clients and steps once for each selected client; its momentum goes on
moving the others. In terms of one client, with velocities v and u, at first 0:

    its own step:        v+ = m v + ||x+ - z||^2 - gamma,  u+ = m u + lambda                (d)
    another's:           v+ = m v,  u+ = m u                                                (e)
    after either:        lambda+ = clip(lambda + alpha v+, ...),  gamma+ = gamma + alpha_gamma u+

(e) needs nothing but the client's own state and the number of the others' steps, so it is made up
for, exactly, when the client takes part again: the server counts the steps (``Turn``), one for each
client asked in a round that was not void, in an order drawn for every round.

Reference: see ``fl_strategies.fedbc``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack

from fl_strategies.randomness import stream
from fl_strategies.schedules import Knob, check
from fl_strategies.strategy import FederatedStrategy, Knobs, Options, Scalar, Upload
from fl_strategies.subproblem import Vector

Gamma: TypeAlias = float | Literal["heuristic"]

ABSURD = 1e12
"""A lambda above this is refused where lambda_max is infinite: it would silence everyone else."""


class State(NamedTuple):
    """What a client keeps: its model x, lambda and gamma, and for (d), (e) v, u and a clock.

    x is [d] and the rest are numbers, or [clients, d] and [clients] for a stack of clients.
    """

    x: Vector
    lam: Any
    gamma: Any
    v: Any = 0.0
    u: Any = 0.0
    clock: int = 0


class Dual(NamedTuple):
    """The knobs of (a)-(e)."""

    alpha: float
    alpha_gamma: float
    gamma: Gamma
    lambda_min: float
    lambda_max: float
    dual_momentum: float


class Turn(NamedTuple):
    """Dual steps taken, by anyone, before a client's own, and those after it in the same round."""

    clock: int = 0
    after: int = 0


FIRST = Turn()


def first_state(z: Vector, dual: Dual) -> State:
    """Return the state of a client that has never taken part: x = z, lambda 0 clipped, gamma 0."""
    gamma = 0.0 if dual.gamma == "heuristic" else dual.gamma
    return State(x=z, lam=_clip(0.0, dual), gamma=gamma)


def idle_steps(state: State, dual: Dual, steps: int) -> State:
    """Return the state after ``steps`` dual steps of other clients, by (e) summed up."""
    m, n = dual.dual_momentum, max(steps, 0)
    moved = m * (1 - m**n) / (1 - m)  # m + m^2 + ... + m^n
    # v keeps its sign meanwhile, so that clipping once at the end is clipping at every step
    lam = _clip(state.lam + dual.alpha * moved * state.v, dual)
    gamma = state.gamma
    if dual.gamma == "heuristic":
        gamma = gamma + dual.alpha_gamma * moved * state.u
    return state._replace(lam=lam, gamma=gamma, v=m**n * state.v, u=m**n * state.u)


def dual_step(state: State, x: Vector, z: Vector, dual: Dual, turn: Turn) -> State:
    """Return the state with the model ``x`` and the client's own dual step, by (a), (b) and (d)."""
    distance = ((x - z) ** 2).sum(-1)
    if not distance.ndim:  # one client: numbers, in double precision
        distance = float(distance)
    v = dual.dual_momentum * state.v + distance - state.gamma
    u = dual.dual_momentum * state.u + state.lam
    lam, gamma = state.lam + dual.alpha * v, state.gamma
    if dual.gamma == "heuristic":
        gamma = gamma + dual.alpha_gamma * u
    stepped = State(x, lam, gamma, v, u, turn.clock + 1 + turn.after)
    return idle_steps(stepped, dual, turn.after)  # which clips lambda, also after no step


def server_rule(weighted: Iterable[tuple[Vector, float]]) -> tuple[Vector, float]:
    """Return the next z from the clients' (x, lambda), by (c), and the sum of all lambda."""
    plain: Vector = 0.0
    mean: Vector = 0.0
    count, total = 0, 0.0
    for x, lam in weighted:
        if total == 0.0:
            count += 1
            plain = plain + x
        mean = mean + lam * x
        total += lam
    if count == 0:
        raise ValueError("a mean needs at least one vector")
    return (mean / total if total > 0.0 else plain / count), total


def per_client(number: Any) -> Any:
    """Return a client's number, or [clients] numbers as a column that goes with [clients, d]."""
    return number[..., None] if getattr(number, "ndim", 0) else number


def _clip(lam: Any, dual: Dual) -> Any:
    if hasattr(lam, "clip"):
        return lam.clip(dual.lambda_min, dual.lambda_max)
    return min(max(lam, dual.lambda_min), dual.lambda_max)


class DualOptions(Options, total=False):
    """The arguments of :class:`ProximityStrategy` and of all strategies."""

    alpha: Knob
    alpha_gamma: Knob | None
    gamma: Gamma
    lambda_min: float
    lambda_max: float
    dual_momentum: float


class ProximityStrategy(FederatedStrategy):
    """The server half that FedBC and Per-FedBC share: the knobs of the dual step, and (c).

    Parameters
    ----------
    alpha : float or {first round: float}, >= 0 (default 1e-3; the paper tunes 1e-7 ... 1e-2)
        Step size of lambda. Gradient steps of rate lr need lr (L + 2 lambda) < 2 to be stable.
    alpha_gamma : float or {first round: float}, >= 0 (default: alpha)
        Step size of gamma in the heuristic.
    gamma : float >= 0 or "heuristic" (default)
        Allowed squared distance, the same for all clients, or each client's own by (b).
    lambda_min, lambda_max : float >= 0 (default 0 and infinity)
        Range of lambda. Replies outside it are left out; so are those above 1e12 where lambda_max
        is infinite.
    dual_momentum : float in [0, 1) (default 0)
        Momentum of the dual steps as in the authors' code (0.5 there), by (d) and (e); 0 where
        alpha or alpha_gamma is a schedule.
    **options
        Those of :class:`fl_strategies.FederatedStrategy`.

    Raises
    ------
    ValueError
        For a knob outside its range, or lambda_min > lambda_max.
    """

    saved = ("_clock",)

    def __init__(
        self,
        *,
        alpha: Knob = 1e-3,
        alpha_gamma: Knob | None = None,
        gamma: Gamma = "heuristic",
        lambda_min: float = 0.0,
        lambda_max: float = math.inf,
        dual_momentum: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        alpha_gamma = alpha if alpha_gamma is None else alpha_gamma
        check("alpha", alpha, low=0.0, scheduled=True)
        check("alpha_gamma", alpha_gamma, low=0.0, scheduled=True)
        for name, value in (
            ("gamma", 0.0 if gamma == "heuristic" else gamma),
            ("lambda_min", lambda_min),
            ("lambda_max", 0.0 if lambda_max == math.inf else lambda_max),
        ):
            check(name, value, low=0.0)
        if lambda_min > lambda_max:
            raise ValueError(f"lambda_min must be <= lambda_max ({lambda_max}), got {lambda_min}")
        check("dual_momentum", dual_momentum, low=0.0, below=1.0)
        if dual_momentum and (isinstance(alpha, Mapping) or isinstance(alpha_gamma, Mapping)):
            raise ValueError(
                f"dual_momentum must be 0 where alpha or alpha_gamma is a schedule, got"
                f" {dual_momentum}: a client makes up by (e) for rounds whose values it never saw"
            )
        super().__init__(**options)
        self.dual: Knobs = {
            "alpha": alpha,
            "alpha-gamma": alpha_gamma,
            "gamma": gamma,
            "lambda-min": lambda_min,
            "lambda-max": lambda_max,
            "dual-momentum": dual_momentum,
        }
        self.scalar_bounds = {
            "lambda": (lambda_min, ABSURD if lambda_max == math.inf else lambda_max)
        }
        self._clock = 0
        self._warned = False

    def client_knobs(self) -> Knobs:
        return dict(self.dual)

    def request(self, server_round: int, client: int) -> dict[str, Scalar]:
        order = list(stream(self.seed, "dual-steps", self._clock).permutation(self.asked))
        place = order.index(client) if client in order else 0
        return super().request(server_round, client) | {
            "dual-clock": self._clock + place,
            "dual-after": max(len(order) - 1 - place, 0),
        }

    def weight(self, upload: Upload) -> float:
        return upload.scalars["lambda"]

    def aggregate(
        self, server_round: int, theta: Vector, uploads: Iterable[Upload], used: int
    ) -> Vector:
        z, total = server_rule((upload.vector, self.weight(upload)) for upload in uploads)
        if total == 0.0 and not self._warned:
            self._warned = True
            logging.getLogger("flwr").warning(
                "every lambda of round %d is 0: their models are averaged plainly", server_round
            )
        return z

    def commit(self, server_round: int) -> None:
        self._clock += len(self.asked)  # in a void round no dual step was taken
