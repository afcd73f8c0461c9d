"""Primal-dual steps by all clients that skip communication at random, for FedPD and FedPDVR.

Each client has a model, a dual variable and its own copy of the global model. In algorithm round
r = 0, 1, ..., after the local work that made client i's model x+ of (x, lam, x0), it computes

    lam+  = lam + (x+ - x0)/eta                                                 (a)
    x0+   = x+ + eta lam+                                                       (b)

and then, with probability 1 - p, all communicate: x0 = mean of all x0+ (c). With probability p
nobody does: each client takes its own x0+ as its x0 (d).

x, lam  client's model and dual variable [d]; at its first participation x = x0, lam = 0
x0      the global model [d], or between communication rounds the client's copy of it
eta     pull 1/eta, > 0
p       probability that communication is skipped, in [0, 1)

A client keeps x and lam, and no x0. It needs none: communication makes every x0_i the mean, and
the next request holds this mean as its model, to the bit; a skipped round changes neither.

Rounds without communication cost no message. The server draws the coins, a request names the rounds
up to the next communication round, and the client runs them one after the other by (d) before it
uploads. Its random streams depend on the algorithm round alone, so this is the same as one message
for every round. A skipped round is asked for again by the next request, with the same rounds and
streams.

Deviation of the authors' published code, an option: (b) is x0+ = x0 + eta lam+
(``x0_rule="authors"``).

Reference: see ``fl_strategies.fedpd``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from fl_strategies.core.hyperparameters import Schedule, choice, count_of, number
from fl_strategies.core.log import LOGGER
from fl_strategies.core.randomness import stream
from fl_strategies.core.records import Mean, Round, Upload
from fl_strategies.core.schedules import at
from fl_strategies.core.stacks import square_norm
from fl_strategies.core.vectors import Vector, weighted_mean
from fl_strategies.server.algorithm import Next
from fl_strategies.server.strategy import FederatedStrategy

X0Rule: TypeAlias = Literal["paper", "authors"]


def dual_step(
    x: Vector, x0: Vector, lam: Vector, *, eta: float, x0_rule: X0Rule = "paper"
) -> tuple[Vector, Vector]:
    """Return lam+ and x0+ of a client whose local work ended at ``x``, by (a) and (b)."""
    lam = lam + (x - x0) / eta
    base = x if x0_rule == "paper" else x0
    return lam, base + eta * lam


def consensus(x: Vector, x0: Vector) -> dict[str, Any]:
    """Return ||x - x0||^2, as clients report it."""
    return {"consensus": square_norm(x - x0)}


def server_rule(uploads: Iterable[Vector], *, mean: Mean = weighted_mean) -> Vector:
    """Return the mean of the uploads, by (c)."""
    return mean((upload, 1.0) for upload in uploads)


def communicates_after(r: int, *, p: float, seed: int) -> bool:
    """Return whether algorithm round ``r`` ends with communication: a coin of probability 1 - p."""
    return bool(stream(seed, "coin", r).random() >= p)


def rounds_from(first: int, *, p: float, seed: int) -> range:
    """Return the algorithm rounds from ``first`` to the next one with communication."""
    last = first
    while not communicates_after(last, p=p, seed=seed):
        last += 1
    return range(first, last + 1)


def rounds_of(request: Mapping[str, Any]) -> range:
    """Return the algorithm rounds that a request asks for."""
    first = int(request["first-algorithm-round"])
    return range(first, first + count_of(request, "algorithm-rounds"))


class ServerState(NamedTuple):
    """What the server keeps: algorithm and communication rounds done, and where this run began.

    ``before`` counts the algorithm rounds that earlier calls of ``start`` were asked for, or did,
    if more; ``wanted`` those of the current call.
    """

    done: int = 0
    communication_rounds: int = 0
    first: int = 0
    before: int = 0
    wanted: int = 0


class SkippingStrategy(FederatedStrategy):
    """The server half that FedPD and FedPDVR share: the coins, and (c).

    ``fraction_train`` must be 1.

    Notes
    -----
    ``num_rounds`` of :meth:`start` counts algorithm rounds; the rounds that the log prints, in
    which metrics are kept and schedules are read, are the about (1 - p) ``num_rounds``
    communication rounds. Algorithm rounds after the last of them are not run, because nobody would
    receive their result; another ``start`` runs them. Each communication round reports how many
    algorithm rounds (``algorithm-round``) and ``communication-rounds`` are done, and
    ``bytes-saved`` by the algorithm rounds without communication before it. A skipped
    communication round makes the run as many algorithm rounds shorter.
    """

    averages = "models"
    moves_received = False
    folds = True
    reports = ("algorithm-round", "communication-rounds", "bytes-saved")

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
    x0_rule: X0Rule = choice(
        default="paper",
        choices=("paper", "authors"),
        about="(b), or x0+ = x0 + eta lam+.",
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
    missing: Literal["skip", "proceed"] = choice(
        default="skip",
        choices=("skip", "proceed"),
        about="What happens to a round in which a known client is missing: it is skipped, and no"
        " client's state changes; or it takes the mean over the clients present, and only their"
        " states change.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fraction_train != 1.0:
            raise ValueError(
                f"fraction_train must be 1: {type(self).__name__} asks all clients, got"
                f" {self.fraction_train!r}"
            )

    @property
    def chooses_clients(self) -> bool:
        return True  # all

    @property
    def needs_everyone(self) -> bool:
        return self.missing == "skip"

    @classmethod
    def most_steps(cls, config: Mapping[str, Any], local: float, samples: int) -> float:
        return local * count_of(config, "algorithm-rounds")

    def proximal_rate(self, server_round: int) -> float | None:
        return at(self.eta, server_round) if self.p == 0.0 else None

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
        return sum(communicates_after(r, p=self.p, seed=self.seed) for r in rounds)

    def next_rounds(self, state: ServerState) -> range:
        """Return the algorithm rounds up to the next communication round."""
        return rounds_from(state.done, p=self.p, seed=self.seed)

    def client_config(self, state: ServerState, round: Round, client: int) -> Mapping[str, Any]:
        rounds = self.next_rounds(state)
        return {
            "first-algorithm-round": rounds.start,
            "algorithm-rounds": len(rounds),
        }

    def replies_needed(self, round: Round) -> int:
        every_client = round.population if self.missing == "skip" else 1
        return max(every_client, super().replies_needed(round))

    def aggregate(self, state: ServerState, round: Round, uploads: Sequence[Upload]) -> Next:
        if len(uploads) < round.population:
            LOGGER.warning(
                "round %d continues with %d of %d clients",
                round.number,
                len(uploads),
                round.population,
            )
        after = state._replace(
            done=self.next_rounds(state).stop,
            communication_rounds=state.communication_rounds + 1,
        )
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
        "communication-rounds": after.communication_rounds,
        "bytes-saved": skipped * round.traffic,
    }
