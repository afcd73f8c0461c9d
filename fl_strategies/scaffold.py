"""SCAFFOLD: control variates take out of each local step what is particular to its client.

Each client remembers in c_i which way its own gradients point, the server in c which way those of
all clients point on average; local steps follow the client's gradient bent by the difference, so
that they go where all clients would go. Round with theta and c received, for each client i of S:

    w       = theta after K steps  w <- w - lr (g_i(w; b) - c_i + c)            (1)
    c_i+    = c_i - c + (theta - w)/(K lr)                        option II     (2)
    c_i+    = grad f_i(theta)                                     option I      (3)
    theta <- theta + (eta_g/|S|) sum_{i in S} (w_i - theta)                     (4)
    c     <- c + (1/m) sum_{i in S} (c_i+ - c_i)                                (5)

c_i, c  control variates [d] over the trainable parameters, c_i kept by the client, c by the server;
        all start at 0. They travel beside the model: c in the request, c_i+ - c_i in the reply
K       the steps that client i really took; by (1) and (2), c_i+ is the mean of their g_i(w; b)
eta_g   server step, > 0
m       number of clients ever connected

Facts. The server keeps S_c = sum_i c_i, and c = S_c/m: c is the mean of the c_i at all times, also
when clients join later (their c_i is 0), and when replies are lost, as a client whose reply was not
used takes its c_i+ back. A first round is FedAvg's with uniform weights. Full batches, K = 1 and
all clients in S give gradient descent. A client that lost its state begins anew with c_i = 0; what
it was stays in S_c, so that the limit is off as long as it does (``lost_state="refuse"`` leaves
such a client out).

(2) holds for plain gradient steps of one rate: momentum, an adaptive solver, extrapolation or a
box would give a c_i+ that is no mean of gradients (momentum 0.9 one up to ten times too large), and
are refused with option II. Weight decay is plain: it is a term of f_i. Rates may change between
rounds. Option I costs a gradient on all examples more, and goes with any solver.

Reference: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning", ICML 2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack

import numpy as np

from fl_strategies.schedules import Knob, all_among, at, check, one_of
from fl_strategies.strategy import FederatedStrategy, Knobs, Options, Scalar, Upload
from fl_strategies.subproblem import Subproblem, Vector

Option: TypeAlias = Literal["I", "II"]
Walk: TypeAlias = Callable[[Vector, Subproblem], tuple[Vector, Vector | float]]
"""``walk(start, subproblem)`` returns where K gradient steps of rate lr end, and K lr."""

CONTROL = "control"
"""The name under which c and c_i+ - c_i travel."""

PLAIN: Mapping[str, tuple[Scalar, ...]] = {
    "solver": ("gd", "sgd"),
    "solver-params": ("",),
    "momentum": (0.0,),
    "nesterov": (False,),
    "extrapolation": (0.0,),
    "box": (0.0,),
}
"""Local settings under which (2) is a mean of gradients."""


class State(NamedTuple):
    """What a client keeps: its control variate c_i [d]."""

    c: Vector


def first_state(theta: Vector) -> State:
    """Return the state of a client that has never taken part: c_i = 0."""
    return State(c=0.0 * theta)


def check_plain(settings: Mapping[str, Any], option: Option) -> None:
    """Raise ``ValueError`` if (2) is asked for under local settings that it does not hold for."""
    if option == "II":
        all_among(settings, PLAIN, 'SCAFFOLD with option="II" needs plain gradient steps')


def client_rule(
    state: State,
    theta: Vector,
    c: Vector,
    walk: Walk,
    *,
    gradient: Callable[[Vector], Vector] | None = None,
) -> tuple[State, Vector, Vector]:
    """Return the client's next state, w - theta and c_i+ - c_i, by (1), and (2).

    With ``gradient``, which returns grad f_i on all examples, by (3) in place of (2).
    """
    w, length = walk(theta, Subproblem(slope=c - state.c))
    c_new = gradient(theta) if gradient else state.c - c + (theta - w) / length
    return State(c_new), w - theta, c_new - state.c


def server_rule(
    theta: Vector, total: Vector, uploads: Iterable[tuple[Vector, Vector]], *, rate: float
) -> tuple[Vector, Vector]:
    """Return the next model by (4) and the next S_c by (5), from (w_i - theta, c_i+ - c_i)."""
    moved: Vector = 0.0
    count = 0
    for delta, change in uploads:
        moved, total, count = moved + delta, total + change, count + 1
    return theta + rate * (moved / count), total


class SCAFFOLD(FederatedStrategy):
    """SCAFFOLD's server half; see the module's docstring for the rule and every symbol.

    Parameters
    ----------
    eta_g : float or {first round: float}, > 0 (default 1.0)
    option : "I" or "II" (default "II")
        Which c_i+ clients take, (3) or (2).
    **options
        Those of :class:`fl_strategies.FederatedStrategy`.

    Raises
    ------
    ValueError
        For a knob outside its range, or local settings that do not go with option II.
    """

    algorithm = "scaffold"
    averages = "changes"
    beside = (CONTROL,)
    books_changes = True
    saved = ("_total",)

    def __init__(
        self, *, eta_g: Knob = 1.0, option: Option = "II", **options: Unpack[Options]
    ) -> None:
        check("eta_g", eta_g, above=0.0, scheduled=True)
        one_of("option", option, ("I", "II"))
        super().__init__(**options)
        check_plain(self.local, option)
        self.eta_g, self.option = eta_g, option
        self._total: Vector | None = None
        self._next: Vector | None = None

    def begin(self, theta: Vector) -> None:
        if self._total is None:
            self._total = np.zeros_like(theta)

    def vectors(self) -> Mapping[str, Vector]:
        assert self._total is not None
        return {CONTROL: self._total / self.num_clients}

    def client_knobs(self) -> Knobs:
        return {"option": self.option}

    def aggregate(
        self, server_round: int, theta: Vector, uploads: Iterable[Upload], used: int
    ) -> Vector:
        pairs = ((upload.vector, upload.beside[CONTROL]) for upload in uploads)
        rate = at(self.eta_g, server_round)
        theta, self._next = server_rule(theta, self._total, pairs, rate=rate)
        return theta

    def commit(self, server_round: int) -> None:
        self._total = self._next
