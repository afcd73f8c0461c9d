"""The constraint ||x_i - z||^2 <= gamma_i and its scalar dual variable, for FedBC and Per-FedBC.

After the local work that turned client i's model into x+, near the model z that it received:

    lambda+ = clip(lambda + alpha (||x+ - z||^2 - gamma), lambda_min, lambda_max)     (a)
    gamma+  = gamma + alpha_gamma lambda                                              (b)
    z <- sum_i lambda+_i x+_i / sum_i lambda+_i, the plain mean if the sum is 0       (c)

lambda  dual variable and weight of a client, at first 0, clipped to [lambda_min, lambda_max]; with
        lambda_min = lambda_max = c it stays at c
gamma   allowed squared distance: a fixed number, which may be each client's own, or at first 0 and
        then by the heuristic (b)
alpha, alpha_gamma
        step sizes of (a) and of (b)

The heuristic never lowers gamma. If the distance stays bounded, gamma exceeds it in the end; then
lambda falls to lambda_min and stays there. So the heuristic is a schedule that loosens the
constraint, not an estimate of the distance.

The authors' dual optimiser (``dual_momentum`` = m, 0.5 in their code; 0 is the paper's rule) is one
SGD that holds the lambda and gamma of all clients and steps once for each selected client. Its
momentum also moves the other clients' numbers. For one client, with velocities v and u, at first 0:

    its own step:        v+ = m v + ||x+ - z||^2 - gamma,  u+ = m u + lambda                (d)
    another's:           v+ = m v,  u+ = m u                                                (e)
    after either:        lambda+ = clip(lambda + alpha v+, ...),  gamma+ = gamma + alpha_gamma u+

(e) needs only the client's own state and the number of the others' steps. So a client takes all
steps (e) that it missed, exactly, when it takes part again. The server counts the steps (``Turn``):
one for each client asked in a round that is not skipped, in an order drawn for every round.

Reference: see ``fl_strategies.fedbc``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from fl_strategies.core.hyperparameters import PerClient, Schedule, number
from fl_strategies.core.log import LOGGER
from fl_strategies.core.oracle import Solved, Step
from fl_strategies.core.randomness import draw, stream
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.stacks import clip, for_each, square_norm
from fl_strategies.core.vectors import Number, Vector
from fl_strategies.server.algorithm import Next
from fl_strategies.server.strategy import FederatedStrategy

Gamma: TypeAlias = float | Literal["heuristic"]

ABSURD = 1e12
"""A lambda above this is refused if lambda_max is infinite: no other client would have weight."""


class State(NamedTuple):
    """What a client keeps: its model x, lambda and gamma, and for (d), (e) v, u and a clock."""

    x: Vector
    lam: Number
    gamma: Number
    v: Number = 0.0
    u: Number = 0.0
    clock: Number = 0


class Dual(NamedTuple):
    """The hyperparameters of (a)-(e)."""

    alpha: float
    alpha_gamma: float
    gamma: Gamma
    lambda_min: float
    lambda_max: float
    dual_momentum: float


class Turn(NamedTuple):
    """The dual steps of all clients before a client's own, and those after it in the same round."""

    clock: Number = 0
    after: Number = 0


FIRST = Turn()


def dual_of(request: Mapping[str, Any]) -> Dual:
    """Return the hyperparameters of the dual step that a request carries."""
    gamma = request["gamma"]
    check_alpha_gamma(gamma, request)
    return Dual(
        request["alpha"],
        request["alpha-gamma"] if gamma == "heuristic" else 0.0,
        gamma,
        request["lambda-min"],
        request.get("lambda-max", math.inf),
        request["dual-momentum"],
    )


def turn_of(request: Mapping[str, Any]) -> Turn:
    """Return the client's position in the order of dual steps."""
    return Turn(request["dual-clock"], request["dual-after"])


READS = {"dual": dual_of, "turn": turn_of}
"""The arguments of the rules that are made of several values of a request."""


def first_state(z: Vector, *, dual: Dual) -> State:
    """Return the state of a client that has never taken part: x = z, lambda 0 clipped, gamma 0."""
    none = for_each(0.0, z)
    gamma = none if isinstance(dual.gamma, str) else none + dual.gamma
    return State(x=z, lam=_clip(none, dual), gamma=gamma)


def idle_steps(state: State, dual: Dual, steps: Number) -> State:
    """Return the state after ``steps`` dual steps of other clients, by (e) summed up."""
    m, n = dual.dual_momentum, clip(steps, 0, math.inf)
    moved = m * (1 - m**n) / (1 - m)  # m + m^2 + ... + m^n
    # v keeps its sign, so that clipping once at the end is clipping at every step
    lam = _clip(state.lam + dual.alpha * moved * state.v, dual)
    gamma = state.gamma
    if isinstance(dual.gamma, str):  # the heuristic
        gamma = gamma + dual.alpha_gamma * moved * state.u
    return state._replace(lam=lam, gamma=gamma, v=m**n * state.v, u=m**n * state.u)


def dual_step(state: State, x: Vector, z: Vector, dual: Dual, turn: Turn) -> State:
    """Return the state with the model ``x`` and the client's own dual step, by (a), (b) and (d)."""
    v = dual.dual_momentum * state.v + square_norm(x - z) - state.gamma
    u = dual.dual_momentum * state.u + state.lam
    lam, gamma = state.lam + dual.alpha * v, state.gamma
    if isinstance(dual.gamma, str):  # the heuristic
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


def uploaded(state: State, solved: Solved) -> Step:
    """Return the step of a client that keeps ``state``: it uploads x, and lambda as its weight."""
    return Step(state.x, state, {"lambda": state.lam, "gamma": state.gamma}, solved)


def _clip(lam: Number, dual: Dual) -> Number:
    return clip(lam, dual.lambda_min, dual.lambda_max)


def check_alpha_gamma(gamma: PerClient | str, settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``settings`` of a request have a step size for a fixed gamma."""
    if gamma != "heuristic" and "alpha-gamma" in settings:
        value = settings["alpha-gamma"]
        raise ValueError(
            f'alpha_gamma needs gamma="heuristic", got {value!r}: gamma is fixed at {gamma}'
        )


class ServerState(NamedTuple):
    """What the server keeps: the number of dual steps that all clients took so far.

    ``warned`` says that the log has named a round in which every lambda was 0.
    """

    clock: int = 0
    warned: bool = False


def weight(upload: Upload) -> float:
    """Return lambda_i."""
    return upload.scalars["lambda"]


class ProximityStrategy(FederatedStrategy):
    """The server half that FedBC and Per-FedBC share: the dual step's hyperparameters, and (c).

    Raises ``ValueError`` for lambda_min > lambda_max, or alpha_gamma with a fixed gamma.
    """

    folds = weighs = True
    weight = staticmethod(weight)

    alpha: Schedule = number(
        default=1e-3,
        about="Step size of lambda; the paper tunes 1e-7 ... 1e-2. Gradient steps of rate lr need"
        " lr (L + 2 lambda) < 2 to be stable.",
        low=0.0,
        scheduled=True,
        sent="alpha",
    )
    alpha_gamma: Schedule | None = number(
        default=None,
        about="Step size of gamma in the heuristic, by default alpha; refused with a fixed gamma.",
        low=0.0,
        scheduled=True,
    )
    gamma: PerClient | Literal["heuristic"] = number(
        default="heuristic",
        about="Allowed squared distance: a fixed number, or each client's own by (b).",
        low=0.0,
        words=("heuristic",),
        per_client=True,
        sent="gamma",
    )
    lambda_min: float = number(
        default=0.0, about="Lower end of lambda's range.", low=0.0, sent="lambda-min"
    )
    lambda_max: float | None = number(
        default=None,
        about="Upper end of lambda's range, by default none. Replies outside the range are left"
        " out; without an upper end, so are those above 1e12.",
        low=0.0,
        sent="lambda-max",
    )
    dual_momentum: float = number(
        default=0.0,
        about="Momentum of the dual steps, by (d) and (e), as in the authors' code (0.5 there); 0"
        " is needed if alpha or alpha_gamma is a schedule.",
        low=0.0,
        below=1.0,
        sent="dual-momentum",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        high = self.lambda_max
        if high is not None and self.lambda_min > high:
            raise ValueError(f"lambda_min must be <= lambda_max ({high}), got {self.lambda_min}")
        steps_gamma = {} if self.alpha_gamma is None else {"alpha-gamma": self.alpha_gamma}
        check_alpha_gamma(self.gamma, steps_gamma)
        if self.dual_momentum and any(
            isinstance(rate, Mapping) for rate in (self.alpha, self.alpha_gamma)
        ):
            raise ValueError(
                f"dual_momentum must be 0 if alpha or alpha_gamma is a schedule, got"
                f" {self.dual_momentum}: a client takes the steps (e) of rounds whose values it"
                " did not receive"
            )

    @property
    def scalar_bounds(self) -> Mapping[str, tuple[float, float]]:
        high = ABSURD if self.lambda_max is None else self.lambda_max
        return {"lambda": (self.lambda_min, high)}

    def first_state(self, theta: Vector) -> ServerState:
        return ServerState()

    def client_config(self, state: ServerState, round: Round, client: int) -> Mapping[str, Any]:
        order = draw(stream(round.seed, "dual-steps", state.clock), round.asked)
        place = order.index(client) if client in order else 0
        config: dict[str, Any] = {
            "dual-clock": state.clock + place,
            "dual-after": max(len(order) - 1 - place, 0),
        }
        if self.gamma == "heuristic":
            config["alpha-gamma"] = self.alpha if self.alpha_gamma is None else self.alpha_gamma
        return config

    def aggregate(self, state: ServerState, round: Round, uploads: Sequence[Upload]) -> Next:
        z, total = server_rule(self.weighted(round, uploads))
        if total == 0.0 and not state.warned:
            LOGGER.warning(
                "every lambda of round %d is 0: the models are averaged with equal weights",
                round.number,
            )
        # in a skipped round, no dual step
        clock = state.clock + len(round.asked)
        return z, ServerState(clock, state.warned or total == 0.0), {}
