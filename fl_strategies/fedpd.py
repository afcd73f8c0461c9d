"""FedPD: primal-dual steps by all clients; communication is skipped at random.

Each client has a model, a dual variable and its own copy of the global model. In algorithm round
r = 0, 1, ... every client i computes

    x+    = oracle(x, lam, x0)                                                  (1)
    lam+  = lam + (x+ - x0)/eta                                                 (2)
    x0+   = x+ + eta lam+                                                       (3)

and then, with probability 1 - p, all communicate: x0 = mean of all x0+ (4). With probability p
nobody does: each client takes its own x0+ as its x0 (5).

Oracle I:   x+ ~ argmin_w f_i(w) + <lam, w - x0> + (1/(2 eta)) ||w - x0||^2, started at x, by any
            solver (the paper's: Q steps of GD or SGD)                          (6)
Oracle II:  g = grad f_i(x) if r mod I = 0, then Q times                        (7)
            x'  = eta/(eta+gamma) x + gamma/(eta+gamma) x0 - eta gamma/(eta+gamma) (g + lam)
            g  += mean over B samples of (grad at x' - grad at x), the same samples for both
            x   = x'

x, lam  client's model and dual variable [d]; at its first participation x = x0, lam = 0
x0      the global model [d], or between communication rounds the client's copy of it
g       oracle II's estimate of grad f_i [d]; the full gradient at a first participation
eta     pull 1/eta, > 0; the theory wants eta < (sqrt5 - 1)/(4 L) where each f_i is L-smooth
p       probability that communication is skipped, in [0, 1)
gamma, Q, B, I    oracle II's rate, steps, samples a step, rounds from full gradient to full one

A client keeps (x, lam, g) and no x0. It needs none: communication makes every x0_i the mean, and
the next request holds this mean as its model, to the bit; a void round changes neither.

Skipped rounds cost no message. The server draws the coins, a request names the rounds up to the
next communication round, and the client runs them one after the other by (5) before it uploads. Its
random streams depend on the algorithm round alone, so this is the same as one message for every
round.
A void round is asked for again by the next request, with the same rounds and streams.

Fixed points have x_i = x0 and lam_i = -grad f_i(x0) with sum lam_i = 0 over all clients: stationary
points of the mean of all f_i, whatever the duals summed to before.

Deviation of the authors' published code, an option: (3) is x0+ = x0 + eta lam+
(``x0_rule="authors"``, in ``FedPD.authors_rule``).

Reference: Zhang, Hong, Dhople, Yin, Liu, "FedPD: A Federated Learning Framework with Adaptivity to
Non-IID Data", IEEE Transactions on Signal Processing 2021, Algorithms 2-4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from fl_strategies.core.columns import choose, repeated, square_norm
from fl_strategies.core.hyperparameters import Scalar, Schedule, choice, number
from fl_strategies.core.local import default_training
from fl_strategies.core.log import LOGGER
from fl_strategies.core.oracle import Oracle, Solved, Step, Tally
from fl_strategies.core.randomness import stream
from fl_strategies.core.records import Mean, Round, Upload
from fl_strategies.core.schedules import one_of
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector, weighted_mean
from fl_strategies.server.algorithm import Card, Next
from fl_strategies.server.strategy import FederatedStrategy

X0Rule: TypeAlias = Literal["paper", "authors"]


class State(NamedTuple):
    """What a client keeps: x, lam, and oracle II's g (``[..., 0]`` while it has none)."""

    x: Vector
    lam: Vector
    g: Vector


class VarianceReduced(NamedTuple):
    """Hyperparameters of oracle II: gamma, Q, B, and whether r mod I = 0."""

    gamma: float
    steps: int
    samples: int
    refresh: bool


def first_state(x0: Vector) -> State:
    """Return the state of a client that has never taken part: x = x0, lam = 0, no g."""
    return State(x=x0, lam=0.0 * x0, g=x0[..., :0])


def oracle_one(
    state: State, x0: Vector, oracle: Oracle, *, eta: float
) -> tuple[Vector, Vector, Solved]:
    """Return x+ by (6), no g, and what the solver did."""
    pulled = Subproblem(slope=state.lam, pull=1.0 / eta, centre=x0)
    solved = oracle.solve(state.x, pulled)
    return solved.w, state.g[..., :0], solved


def oracle_two(
    state: State, x0: Vector, oracle: Oracle, two: VarianceReduced, *, eta: float
) -> tuple[Vector, Vector, Solved]:
    """Return x+ and g by (7), and what the steps came to."""
    x, lam, g = state
    gamma = two.gamma
    if g.shape[-1] == 0:
        g = oracle.full_gradient(x)
    elif two.refresh is not False:
        g = choose(two.refresh, oracle.full_gradient(x), g)

    def step(x: Vector, g: Vector, done: Tally) -> tuple[Vector, Vector, Tally]:
        x_new = (eta * x + gamma * x0 - eta * gamma * (g + lam)) / (eta + gamma)
        change = oracle.difference(x_new, x, samples=two.samples)
        return x_new, g + change.vector, done.plus(change)

    x, g, done = repeated(two.steps, step, x, g, Tally())
    return x, g, done.mean(x, two.steps, epochs=0)


def client_rule(
    state: State,
    x0: Vector,
    oracle: Oracle,
    *,
    eta: float,
    x0_rule: X0Rule = "paper",
    two: VarianceReduced | None = None,
) -> Step:
    """Return the client's next state and its upload x0+, by (1)-(3).

    With ``two``, (1) is oracle II.
    """
    if two is None:
        x, g, solved = oracle_one(state, x0, oracle, eta=eta)
    else:
        x, g, solved = oracle_two(state, x0, oracle, two, eta=eta)
    lam = state.lam + (x - x0) / eta
    base = x if x0_rule == "paper" else x0
    scalars = {"consensus": square_norm(x - x0)}
    return Step(base + eta * lam, State(x, lam, g), scalars, solved)


def server_rule(uploads: Iterable[Vector], *, mean: Mean = weighted_mean) -> Vector:
    """Return the mean of the uploads, by (4)."""
    return mean((upload, 1.0) for upload in uploads)


ORACLE_TWO: Mapping[str, float] = MappingProxyType(
    {"gamma": 1.0, "inner-steps": 8, "inner-batch": 1, "full-every": 20}
)
"""Hyperparameters of oracle II and their defaults; oracle I uses none of them."""

FINE_TUNING = ("fine-tune", "fine-tune-lr", "lr", "batch-size")
"""What ``fine-tune``, which measures models, reads of ``local``."""


def unused_by(oracle: str, settings: Mapping[str, Any]) -> list[str]:
    """Return which of ``settings``, spelt as in requests, the oracle has no use for."""
    if oracle == "I":
        return sorted(settings.keys() & ORACLE_TWO.keys())
    tunes = settings.get("fine-tune", "off") != "off"
    used = FINE_TUNING if tunes else ("fine-tune",)
    return sorted(settings.keys() & default_training().settings.keys() - set(used))


def check_oracle(oracle: str, settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for ``settings``, spelt as in requests, that the oracle cannot use."""
    one_of("oracle", oracle, ("I", "II"))
    if unused := unused_by(oracle, settings):
        means = "local" if oracle == "I" else ", ".join(ORACLE_TWO)
        given = ", ".join(f"{name} = {settings[name]!r}" for name in unused)
        raise ValueError(f"oracle {oracle} has no use for {given}: its steps are set by {means}")


def exchanges_after(r: int, *, p: float, seed: int) -> bool:
    """Return whether algorithm round ``r`` ends with communication: a coin of probability 1 - p."""
    return bool(stream(seed, "coin", r).random() >= p)


def rounds_from(first: int, *, p: float, seed: int) -> range:
    """Return the algorithm rounds from ``first`` to the next one with communication."""
    last = first
    while not exchanges_after(last, p=p, seed=seed):
        last += 1
    return range(first, last + 1)


class ServerState(NamedTuple):
    """What the server keeps: algorithm and communication rounds done, and where this run began.

    ``before`` counts the algorithm rounds that earlier calls of ``start`` were asked for, or did,
    if more; ``wanted`` those of the current call.
    """

    done: int = 0
    exchanges: int = 0
    first: int = 0
    before: int = 0
    wanted: int = 0


class FedPD(FederatedStrategy):
    """FedPD's server half; see the module's docstring for the rule and every symbol.

    ``fraction_train`` must be 1. Raises ``ValueError`` for a hyperparameter that the oracle has no
    use for.

    Notes
    -----
    ``num_rounds`` of :meth:`start` counts algorithm rounds; the rounds that the log prints, in
    which metrics are kept and schedules are read, are the about (1 - p) ``num_rounds``
    communication rounds. Algorithm rounds after the last of them are not run, because nobody would
    receive their result; another ``start`` runs them. Each communication round reports
    ``algorithm-round`` (how many are done), ``exchanges`` (how many communication rounds so far)
    and ``bytes-saved`` (by the algorithm rounds without communication before it). If a
    communication round changes nothing (``skipped``), the run gets as many algorithm rounds
    shorter.
    """

    algorithm = "fedpd"
    card = Card(
        "FedPD",
        "primal-dual steps by all clients; skips communication rounds at random",
        when="all clients take part and communication is expensive",
        keeps="model, dual",
        paper="Zhang et al., IEEE TSP 2021",
    )
    averages = "models"
    folds = True
    reports = ("algorithm-round", "exchanges", "bytes-saved")
    paper_rule: ClassVar[Mapping[str, Any]] = {"eta": 1.0, "oracle": "I", "x0_rule": "paper"}
    paper_local: ClassVar[Mapping[str, Scalar]] = {"lr": 0.01, "steps": 300, "batch-size": 2}
    authors_rule: ClassVar[Mapping[str, Any]] = {"oracle": "I", "x0_rule": "authors"}
    authors_local: ClassVar[Mapping[str, Scalar]] = {"solver": "gd", "epochs": 8}

    eta: Schedule = number(
        default=1.0,
        about="The pull of the local problem is 1/eta.",
        above=0.0,
        scheduled=True,
        sent="eta",
    )
    p: float = number(
        default=0.0,
        about="Probability that a round ends without communication.",
        low=0.0,
        below=1.0,
    )
    oracle: Literal["I", "II"] = choice(
        default="I",
        choices=("I", "II"),
        about='"I" solves (6) as `local` says. "II" is (7), which uses nothing of `local` except'
        " what `fine-tune` needs. Its clients need full gradients of f_i: a client without them,"
        " whose problem streams its samples, answers with an error that says so.",
        sent="oracle",
    )
    gamma: Schedule | None = number(
        default=None,
        about="Rate of oracle II (1), refused with oracle I.",
        above=0.0,
        scheduled=True,
    )
    inner_steps: int | None = number(default=None, about="Q of oracle II (8).", integer=True, low=1)
    inner_batch: int | None = number(
        default=None,
        about="B of oracle II (1; 0: all samples); the samples are drawn with replacement.",
        integer=True,
        low=0,
    )
    full_every: int | None = number(default=None, about="I of oracle II (20).", integer=True, low=1)
    x0_rule: X0Rule = choice(
        default="paper",
        choices=("paper", "authors"),
        about="(3), or x0+ = x0 + eta lam+.",
        sent="x0-rule",
    )
    num_clients: int = number(
        default=0,
        about="Number of clients, if it is known (0: not known) and above the number of clients"
        " ever connected, which counts otherwise. In a round with fewer usable replies a client is"
        " missing.",
        integer=True,
        low=0,
    )
    missing: Literal["void", "proceed"] = choice(
        default="void",
        choices=("void", "proceed"),
        about="What happens to a round in which a known client is missing: it is skipped, and no"
        " client's state changes; or it takes the mean over the clients present, and only their"
        " states change.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fraction_train != 1.0:
            raise ValueError(
                f"fraction_train must be 1: FedPD asks all clients, got {self.fraction_train!r}"
            )
        given = {
            name: value
            for name in ORACLE_TWO
            if (value := getattr(self, name.replace("-", "_"))) is not None
        }
        check_oracle(self.oracle, given if self.oracle == "I" else self.local)
        self.oracle_two = {**ORACLE_TWO, **given} if self.oracle == "II" else {}

    def first_state(self, theta: Vector) -> ServerState:
        return ServerState()

    def begin(self, state: ServerState, round: Round, num_rounds: int) -> ServerState:
        before = max(state.before + state.wanted, state.done)
        return state._replace(first=state.done, before=before, wanted=num_rounds)

    def communication_rounds(self, state: ServerState | None, num_rounds: int) -> int:
        """Return how many of the run's algorithm rounds end with communication.

        The run has ``num_rounds``, and those that earlier runs were asked for and did not run.
        """
        state = state or ServerState()
        rounds = range(state.first, state.before + num_rounds)
        return sum(exchanges_after(r, p=self.p, seed=self.seed) for r in rounds)

    def next_rounds(self, state: ServerState) -> range:
        """Return the algorithm rounds up to the next communication round."""
        return rounds_from(state.done, p=self.p, seed=self.seed)

    def client_config(self, state: ServerState, round: Round, client: int) -> Mapping[str, Any]:
        rounds = self.next_rounds(state)
        return {
            "first-algorithm-round": rounds.start,
            "algorithm-rounds": len(rounds),
            **self.oracle_two,
        }

    def replies_needed(self, round: Round) -> int:
        every_client = round.population if self.missing == "void" else 1
        return max(every_client, super().replies_needed(round))

    def aggregate(self, state: ServerState, round: Round, uploads: Sequence[Upload]) -> Next:
        if len(uploads) < round.population:
            LOGGER.warning(
                "round %d continues with %d of %d clients",
                round.number,
                len(uploads),
                round.population,
            )
        after = state._replace(done=self.next_rounds(state).stop, exchanges=state.exchanges + 1)
        x0 = server_rule((upload.vector for upload in uploads), mean=round.mean)
        return x0, after, progress(state, after, round)

    def skipped(
        self, state: ServerState, round: Round, uploads: Sequence[Upload]
    ) -> tuple[ServerState, Mapping[str, float]]:
        return state, progress(state, state, round)


def progress(before: ServerState, after: ServerState, round: Round) -> dict[str, float]:
    """Return the numbers of a round with these states before and after it."""
    skipped = max(after.done - before.done - 1, 0)
    return {
        "algorithm-round": after.done,
        "exchanges": after.exchanges,
        "bytes-saved": skipped * round.traffic,
    }
