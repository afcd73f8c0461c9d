"""FedADMM: dual variables and a tracking update, with partial participation.

Each client remembers how it disagrees with the rest in a dual variable y, which bends its local
problem until its own minimiser is the common one; the server tracks the mean of all clients, also
of those that are absent. Round with the model theta received, for each client i of S:

    w+    ~ argmin_w  f_i(w) + <y, w - theta> + (rho/2) ||w - theta||^2         (1)
    y+    = y + rho (w+ - theta)                                                (2)
    Delta = (w+ + y+/rho) - (w + y/rho)                                         (3)
    theta <- theta + (eta/|S|) sum_{i in S} Delta_i                             (4)

w, y    client's model and dual variable [d], both kept by the client; at its first participation
        w = theta (the paper leaves it open: a common start theta^0 adds theta^t - theta^0 again for
        every newcomer) and y = 0
rho     penalty, > 0; a schedule {first round: rho} is allowed: (3) then takes y/rho with the rho of
        the client's last participation, so that the sums of (4) still telescope
eta     server step, in (0, 2]: a number, a schedule, or "fraction" = |S|/m for m clients

Facts. After a round of all m clients with eta = 1, and with eta = "fraction" from then on,
theta = (1/m) sum_i (w_i + y_i/rho), whoever takes part. Without such a first round that mean is
missed, and theta rests off the optimum where only some of the clients take part in a round. With y
frozen at 0 and Delta = w+ - theta this is FedProx; with rho = 0 as well, FedAvg.

Deviations of the authors' published code, each an option: local training starts from theta
(``local_start="global"``); Delta is taken against theta, so that it is 2 (w+ - theta)
(``tracking="global"``). Both together are ``FedADMM.authors_rule``.

Reference: Gong, Li, Freris, "FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to
System Heterogeneity", ICDE 2022, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, NamedTuple, TypeAlias, Unpack

from fl_strategies.schedules import Knob, at, check, one_of
from fl_strategies.strategy import FederatedStrategy, Knobs, Options, Upload
from fl_strategies.subproblem import Solve, Subproblem, Vector, weighted_mean

Side: TypeAlias = Literal["client", "global"]


class State(NamedTuple):
    """What a client keeps: model w, dual variable y, and the rho of its last participation."""

    w: Vector
    y: Vector
    rho: float


def first_state(theta: Vector, *, rho: float) -> State:
    """Return the state of a client that has never taken part: w = theta, y = 0."""
    return State(w=theta, y=0.0 * theta, rho=rho)


def client_rule(
    state: State,
    theta: Vector,
    solve: Solve,
    *,
    rho: float,
    local_start: Side = "client",
    tracking: Side = "client",
) -> tuple[State, Vector]:
    """Return the client's next state and its upload Delta, by (1)-(3)."""
    w, y, rho_before = state
    start = w if local_start == "client" else theta
    w_new = solve(start, Subproblem(slope=y, pull=rho, centre=theta))
    y_new = y + rho * (w_new - theta)
    before = w + y / rho_before if tracking == "client" else theta + y / rho
    delta = (w_new + y_new / rho) - before
    return State(w_new, y_new, rho), delta


def server_rule(theta: Vector, deltas: Iterable[Vector], *, step: float) -> Vector:
    """Return theta + step * (mean of the Deltas), by (4) with step = eta."""
    return theta + step * weighted_mean((delta, 1.0) for delta in deltas)


class FedADMM(FederatedStrategy):
    """FedADMM's server half; see the module's docstring for the rule and every symbol.

    Parameters
    ----------
    rho : float or {first round: float}, > 0 (default 0.01, the paper's)
    eta : float or {first round: float} in (0, 2], or "fraction" (default 1.0)
        Server step; "fraction" is |S|/m, with |S| the replies used and m all known clients.
    local_start : "client" or "global" (default "client")
        Whether (1) is started from the client's own w or from theta.
    tracking : "client" or "global" (default "client")
        Whether Delta is taken against the client's own w or against theta.
    **options
        Those of :class:`fl_strategies.FederatedStrategy`.

    Raises
    ------
    ValueError
        For a knob outside its range.
    """

    algorithm = "fedadmm"
    averages = "changes"
    books_changes = True
    authors_rule: ClassVar[Mapping[str, Side]] = {"local_start": "global", "tracking": "global"}

    def __init__(
        self,
        *,
        rho: Knob = 0.01,
        eta: Knob | Literal["fraction"] = 1.0,
        local_start: Side = "client",
        tracking: Side = "client",
        **options: Unpack[Options],
    ) -> None:
        check("rho", rho, above=0.0, scheduled=True)
        if eta != "fraction":
            check("eta", eta, above=0.0, high=2.0, scheduled=True)
        one_of("local_start", local_start, ("client", "global"))
        one_of("tracking", tracking, ("client", "global"))
        super().__init__(**options)
        self.rho, self.eta = rho, eta
        self.local_start, self.tracking = local_start, tracking

    def client_knobs(self) -> Knobs:
        return {
            "rho": self.rho,
            "local-start": self.local_start,
            "tracking": self.tracking,
        }

    def aggregate(
        self, server_round: int, theta: Vector, uploads: Iterable[Upload], used: int
    ) -> Vector:
        fraction = used / self.num_clients
        step = fraction if self.eta == "fraction" else at(self.eta, server_round)
        return server_rule(theta, (upload.vector for upload in uploads), step=step)
