"""FedPD: primal-dual steps by all clients, with exchanges that can be skipped at random.

Each client has a model, a dual variable and its own idea of the common model. In algorithm round
r = 0, 1, ... every client i computes

    x+    = oracle(x, lam, x0)                                                  (1)
    lam+  = lam + (x+ - x0)/eta                                                 (2)
    x0+   = x+ + eta lam+                                                       (3)

and then, with probability 1 - p, all exchange: x0 = mean of all x0+ (4). With probability p nobody
does: each client goes on with its own x0+ as its x0 (5).

Oracle I:   x+ ~ argmin_w f_i(w) + <lam, w - x0> + (1/(2 eta)) ||w - x0||^2, started at x, by any
            solver (the paper's: Q steps of GD or SGD)                          (6)
Oracle II:  g = grad f_i(x) if r mod I = 0, then Q times                        (7)
            x'  = eta/(eta+gamma) x + gamma/(eta+gamma) x0 - eta gamma/(eta+gamma) (g + lam)
            g  += mean over B examples of (grad at x' - grad at x), the same examples for both
            x   = x'

x, lam  client's model and dual variable [d]; at its first participation x = x0, lam = 0
x0      the common model [d], or between exchanges the client's idea of it
g       oracle II's estimate of grad f_i [d]; the full gradient at a first participation
eta     pull 1/eta, > 0; the theory wants eta < (sqrt5 - 1)/(4 L) where each f_i is L-smooth
p       probability that an exchange is skipped, in [0, 1)
gamma, Q, B, I    oracle II's rate, steps, examples a step, rounds from full gradient to full one

A client keeps (x, lam, g) and no x0. Nothing is lost by that: an exchange makes every x0_i the
mean, and the next request brings this mean as its model, to the bit; a void round changes neither.

Skipped rounds cost no message. The server draws the coins, a request names the rounds up to the
next exchange, and the client runs them one after the other by (5) before it uploads. Its random
streams depend on the algorithm round alone, so this is the same as one message for every round.
A void round is asked for again by the next request, with the same rounds and streams.

Fixed points have x_i = x0 and lam_i = -grad f_i(x0) with sum lam_i = 0 over all clients: stationary
points of the mean of all f_i, whatever the duals summed to before.

Deviation of the authors' published code, an option: (3) is x0+ = x0 + eta lam+
(``x0_rule="authors"``).

Reference: Zhang, Hong, Dhople, Yin, Liu, "FedPD: A Federated Learning Framework with Adaptivity to
Non-IID Data", IEEE Transactions on Signal Processing 2021, Algorithms 2-4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, Unpack, cast

from fl_strategies.randomness import stream
from fl_strategies.schedules import Knob, check, one_of
from fl_strategies.strategy import FederatedStrategy, Knobs, Options, Upload
from fl_strategies.subproblem import Solve, Subproblem, Vector, weighted_mean

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message, MetricRecord

X0Rule: TypeAlias = Literal["paper", "authors"]


class State(NamedTuple):
    """What a client keeps: x, lam, and oracle II's g (``[..., 0]`` while it has none)."""

    x: Vector
    lam: Vector
    g: Vector


Oracle: TypeAlias = Callable[[State, Vector], tuple[Vector, Vector]]
"""``oracle(state, x0)`` returns x+ and the g to keep."""


def first_state(x0: Vector) -> State:
    """Return the state of a client that has never taken part: x = x0, lam = 0, no g."""
    return State(x=x0, lam=0.0 * x0, g=x0[..., :0])


def oracle_one(state: State, x0: Vector, solve: Solve, *, eta: float) -> tuple[Vector, Vector]:
    """Return x+ by (6), and no g."""
    x = solve(state.x, Subproblem(slope=state.lam, pull=1.0 / eta, centre=x0))
    return x, state.g[..., :0]


def oracle_two(
    state: State,
    x0: Vector,
    full_gradient: Callable[[Vector], Vector],
    change: Callable[[Vector, Vector], Vector],
    *,
    refresh: bool,
    eta: float,
    gamma: float,
    steps: int,
) -> tuple[Vector, Vector]:
    """Return x+ and g by (7).

    ``full_gradient(x)`` is grad f_i at x; ``change(new, old)`` the mean, over examples drawn anew
    at each call, of each one's gradient at ``new`` minus that at ``old``. ``refresh`` says whether
    r mod I = 0.
    """
    x, lam, g = state
    if refresh or g.shape[-1] == 0:
        g = full_gradient(x)
    for _ in range(steps):
        x_new = (eta * x + gamma * x0 - eta * gamma * (g + lam)) / (eta + gamma)
        g = g + change(x_new, x)
        x = x_new
    return x, g


def client_rule(
    state: State, x0: Vector, oracle: Oracle, *, eta: float, x0_rule: X0Rule = "paper"
) -> tuple[State, Vector]:
    """Return the client's next state and its upload x0+, by (1)-(3)."""
    x, g = oracle(state, x0)
    lam = state.lam + (x - x0) / eta
    base = x if x0_rule == "paper" else x0
    return State(x, lam, g), base + eta * lam


def server_rule(uploads: Iterable[Vector]) -> Vector:
    """Return the mean of the uploads, by (4)."""
    return weighted_mean((upload, 1.0) for upload in uploads)


def exchanges_after(r: int, *, p: float, seed: int) -> bool:
    """Return whether algorithm round ``r`` ends in an exchange: a coin of probability 1 - p."""
    return bool(stream(seed, "coin", r).random() >= p)


def rounds_from(first: int, *, p: float, seed: int) -> range:
    """Return the algorithm rounds from ``first`` to the first one that ends in an exchange."""
    last = first
    while not exchanges_after(last, p=p, seed=seed):
        last += 1
    return range(first, last + 1)


class FedPD(FederatedStrategy):
    """FedPD's server half; see the module's docstring for the rule and every symbol.

    Parameters
    ----------
    eta : float or {first round: float}, > 0 (default 1.0)
        The pull of the local problem is 1/eta.
    p : float in [0, 1) (default 0.0)
        Probability that a round ends without exchange.
    oracle : "I" or "II" (default "I")
        "I" solves (6) as ``local`` says; "II" is (7), which needs clients with access to full
        gradients of f_i: one without (whose problem streams its examples, say) answers with an
        error that says so.
    gamma : float or {first round: float}, > 0 (default 1.0)
    inner_steps : int >= 1 (default 8)
    inner_batch : int >= 0 (default 1; 0: all examples)
    full_every : int >= 1 (default 20)
        gamma, Q, B and I of oracle II; the examples are drawn with replacement.
    x0_rule : "paper" or "authors" (default "paper")
        (3), or x0+ = x0 + eta lam+.
    missing : "void" or "proceed" (default "void")
        What becomes of a round in which a known client is missing: it is void, so that no client's
        state moves; or it goes on with the mean of those present, who alone move.
    **options
        Those of :class:`fl_strategies.FederatedStrategy`; ``fraction_train`` must be 1.

    Raises
    ------
    ValueError
        For a knob outside its range.

    Notes
    -----
    ``num_rounds`` of :meth:`start` counts algorithm rounds; Flower's rounds, in which metrics are
    kept and schedules are read, are the about (1 - p) ``num_rounds`` exchanges. What
    follows after the last exchange would reach nobody and is not run; another ``start`` makes up
    for it. Each exchange reports ``algorithm-round`` (how many are done), ``exchanges`` (so far)
    and ``bytes-saved`` (by the rounds skipped before it). A void exchange takes one of Flower's
    rounds, and leaves the run as many algorithm rounds shorter.
    """

    algorithm = "fedpd"
    averages = "models"
    saved = ("exchanges", "_first", "_done", "_before")

    def __init__(
        self,
        *,
        eta: Knob = 1.0,
        p: float = 0.0,
        oracle: Literal["I", "II"] = "I",
        gamma: Knob = 1.0,
        inner_steps: int = 8,
        inner_batch: int = 1,
        full_every: int = 20,
        x0_rule: X0Rule = "paper",
        missing: Literal["void", "proceed"] = "void",
        **options: Unpack[Options],
    ) -> None:
        check("eta", eta, above=0.0, scheduled=True)
        check("p", p, low=0.0, below=1.0)
        one_of("oracle", oracle, ("I", "II"))
        check("gamma", gamma, above=0.0, scheduled=True)
        check("inner_steps", inner_steps, low=1, integer=True)
        check("inner_batch", inner_batch, low=0, integer=True)
        check("full_every", full_every, low=1, integer=True)
        one_of("x0_rule", x0_rule, ("paper", "authors"))
        one_of("missing", missing, ("void", "proceed"))
        if (fraction := options.get("fraction_train", 1.0)) != 1.0:
            raise ValueError(f"fraction_train must be 1: FedPD asks all clients, got {fraction!r}")
        super().__init__(**options)
        self.eta, self.p, self.oracle, self.x0_rule = eta, p, oracle, x0_rule
        self.gamma, self.inner_steps, self.inner_batch = gamma, inner_steps, inner_batch
        self.full_every, self.missing = full_every, missing
        self.exchanges = self._first = self._done = self._before = self._asked_for = 0

    def open(self, initial_arrays: ArrayRecord, num_rounds: int) -> None:
        self._first = self._done
        self._before = max(self._before + self._asked_for, self._done)
        self._asked_for = num_rounds
        super().open(initial_arrays, num_rounds)

    def exchanges_in(self, num_rounds: int) -> int:
        """Return how many of the run's algorithm rounds end in an exchange.

        They are ``num_rounds``, and those that earlier runs were asked for and did not come to.
        """
        rounds = range(self._first, self._before + num_rounds)
        return sum(exchanges_after(r, p=self.p, seed=self.seed) for r in rounds)

    @property
    def next_rounds(self) -> range:
        """The algorithm rounds up to the next exchange."""
        return rounds_from(self._done, p=self.p, seed=self.seed)

    def client_knobs(self) -> Knobs:
        knobs: Knobs = {
            "eta": self.eta,
            "oracle": self.oracle,
            "x0-rule": self.x0_rule,
            "first-algorithm-round": self.next_rounds.start,
            "algorithm-rounds": len(self.next_rounds),
        }
        if self.oracle == "II":
            knobs |= {
                "gamma": self.gamma,
                "inner-steps": self.inner_steps,
                "inner-batch": self.inner_batch,
                "full-every": self.full_every,
            }
        return knobs

    def replies_needed(self) -> int:
        every_client = self.num_clients if self.missing == "void" else 1
        return max(every_client, super().replies_needed())

    def aggregate(
        self, server_round: int, theta: Vector, uploads: Iterable[Upload], used: int
    ) -> Vector:
        if used < self.num_clients:
            self._say(server_round, f"goes on with {used} of {self.num_clients} clients")
        return server_rule(upload.vector for upload in uploads)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As :meth:`FederatedStrategy.aggregate_train`; the coins of the next exchange follow."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert metrics is not None
        skipped = 0
        if arrays is not None:
            skipped = len(self.next_rounds) - 1
            self.exchanges += 1
            self._done = self.next_rounds.stop
        metrics["algorithm-round"] = self._done
        metrics["exchanges"] = self.exchanges
        bytes_each = sum(cast(int, metrics[name]) for name in ("bytes-down", "bytes-up"))
        metrics["bytes-saved"] = skipped * bytes_each
        return arrays, metrics
