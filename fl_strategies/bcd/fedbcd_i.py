"""FedBCD-I: FedBCD whose devices train on their own data offline, and are pulled on contact.

Of the available devices only some are active, which means in contact. An available device trains on
f_i only, K_i ~ U{1..K} times (ASPG), in at most ``offline_rounds`` rounds without contact:

    e  = x + zeta (x - x_prev);   x+ = Proj_X( e - eta_x grad f_i(e) )           (1)

An active device then receives z and is pulled towards it, K_i times with that round's K_i,

    x+ = Proj_X( x - gamma_i (x - z) )                                          (2)

and uploads x. The server's step goes over the active devices alone, K_z times:

    z <- z - eta_z sum_{i active} gamma_i (z - x_i)                     "sum"   (3)
    z <- z - eta_z (z - sum gamma_i x_i / sum gamma_i)                  "mean"  (4)

x, x_prev   device's model [d] and the iterate before it, kept by the device; a newcomer's is the z
            received. After (2) x_prev is the iterate before the last pull, as Algorithm 2 has it
gamma_i     pull in (0, 1], the paper's 0.2; K is as in ``fl_strategies.bcd.fedbcd``

Nothing travels offline, so a device does this work when it gets its next message. The server draws
which devices are available, and tells a device the number of rounds in which it was available since
its last contact, including this round and at most ``offline_rounds``. The result is exactly the
same and costs no message. A skipped round does not count; a device that was asked without success
counts as available without contact.

A device that lost its state begins anew from the received z; nothing else changes.

The paper's Section 3.2 is what is done: each offline round continues the one before. By line 5 of
its Algorithm 2 each would start at the iterate of the last round in which the device was active.
Algorithm 2 draws samples for each step; here mini-batches are as in ``fl_strategies.bcd.fedbcd``.

Deviations of the authors' code: its cap lets one round more through; K counts mini-batches:
``FedBCDI.authors_rule``, ``authors_local``.

Reference: Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and
Personalized Models", AAAI 2021, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from fl_strategies.bcd.clouds import PAPER_LOCAL, CloudState, CloudStrategy
from fl_strategies.bcd.fedbcd import Sum, added, server_rule, work
from fl_strategies.core.client_half import ClientHalf
from fl_strategies.core.hyperparameters import PerClient, Scalar, count_of, number
from fl_strategies.core.oracle import Oracle, Solved, Step, both
from fl_strategies.core.randomness import draw, share, stream
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.stacks import clip, is_nought, repeated
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import Vector
from fl_strategies.server.algorithm import Card, Next


class State(NamedTuple):
    """What a device keeps: x and the iterate before it."""

    x: Vector
    previous: Vector


def first_state(z: Vector) -> State:
    """Return the state of a device that has never taken part."""
    return State(x=z, previous=z)


def train(state: State, oracle: Oracle, *, rounds: int) -> tuple[Solved, int, int]:
    """Return what the last of ``rounds`` >= 1 rounds of (1) reached; steps, epochs of all."""

    def one_round(last: Solved, steps: int, epochs: int) -> tuple[Solved, int, int]:
        last = oracle.solve(last.w, Subproblem(), previous=last.previous)
        return last, steps + last.steps, both(epochs, last.epochs)

    return repeated(rounds, one_round, Solved(state.x, state.previous, epochs=0), 0, 0)


def pull(state: State, z: Vector, *, gamma: float, times: int, box: float) -> State:
    """Return the state after (2), ``times`` times; a ``box`` of 0 is none."""

    def once(x: Vector, previous: Vector) -> State:
        pulled = x - gamma * (x - z)
        return State(pulled if is_nought(box) else clip(pulled, -box, box), x)

    return State(*repeated(times, once, *state))


def client_rule(
    state: State,
    z: Vector,
    oracle: Oracle,
    *,
    gamma: float,
    offline_rounds: int,
    box: float = 0.0,
) -> Step:
    """Return the device's next state and its upload x, by (1) in ``offline_rounds`` and by (2)."""
    last, steps, epochs = train(state, oracle, rounds=offline_rounds)
    times = work(last, oracle.counts_steps)
    state = pull(State(last.w, last.previous), z, gamma=gamma, times=times, box=box)
    solved = last._replace(steps=steps, epochs=epochs)
    return Step(state.x, state, {"work": times}, solved)


@dataclass(frozen=True)
class ServerState(CloudState):
    """What the server keeps in addition: each device's available rounds since its last contact."""

    offline: Mapping[int, int] = field(default_factory=dict)


Kept = TypeVar("Kept", bound=ServerState)


class FedBCDI(CloudStrategy):
    """FedBCD-I's server half; see the module's docstring for the rule and every symbol."""

    algorithm = "fedbcd-i"
    client_half = ClientHalf(client_rule, State, first_state, own="x")
    card = Card(
        "FedBCD-I",
        "FedBCD whose clients also train without contact to the server",
        when="clients can compute while they are offline",
        keeps="model, last iterate",
        paper="Wu et al., AAAI 2021",
        arxiv="2012.13900",
    )
    paper_rule: ClassVar[Mapping[str, Any]] = {
        "gamma": 0.2,
        "zeta": 0.9,
        "box": 2.0,
        "reduce": "sum",
        "fraction_available": 0.8,
        "offline_rounds": 4,
    }
    paper_local: ClassVar[Mapping[str, Scalar]] = PAPER_LOCAL
    authors_rule: ClassVar[Mapping[str, Any]] = {
        **paper_rule,
        "reduce": "mean",
        "offline_rounds": 5,
    }
    authors_local: ClassVar[Mapping[str, Scalar]] = {"steps": 5, "random-steps": True}
    gamma: PerClient = number(
        default=0.2, about="Pull.", above=0.0, high=1.0, per_client=True, sent="gamma"
    )
    fraction_available: float = number(
        default=0.8,
        about="Share of each cloud server's connected devices that are available in a round; the"
        " active ones (`fraction_train` of all) are among them, and are all if the share is"
        " smaller.",
        above=0.0,
        high=1.0,
    )
    offline_rounds: int = number(
        default=4,
        about="The most rounds that a device trains between two contacts.",
        integer=True,
        low=1,
    )

    def first_state(self, theta: Vector) -> ServerState:
        return ServerState({}, theta)

    def client_config(self, state: ServerState, round: Round, client: int) -> Mapping[str, Any]:
        rounds = min(state.offline.get(client, 0) + 1, self.offline_rounds)
        return {**super().client_config(state, round, client), "offline-rounds": rounds}

    @classmethod
    def most_steps(cls, config: Mapping[str, Any], local: float, samples: int) -> float:
        return local * count_of(config, "offline-rounds")

    def available(self, state: ServerState, round: Round, cloud: int) -> list[int]:
        """Return the connected devices of ``cloud`` that are available in the round."""
        devices = state.devices(cloud, round.connected)
        size = self.active_size(len(devices))
        many = max(size, share(self.fraction_available, len(devices)))
        return draw(stream(round.seed, "available", round.number, cloud), devices)[:many]

    def active(self, state: ServerState, round: Round, cloud: int) -> list[int]:
        size = self.active_size(len(state.devices(cloud, round.connected)))
        return self.first_to_call(round, self.available(state, round, cloud), size)

    def aggregate(self, state: ServerState, round: Round, uploads: Sequence[Upload]) -> Next:
        (z,) = server_rule([round.theta], [self.active_sum(uploads)], **self.step(round.number))
        return z, *self.timed(self.counted(state, round, uploads), round, uploads)

    def active_sum(self, uploads: Iterable[Upload]) -> Sum:
        """Return the sum of (3) and (4) over the devices of ``uploads``."""
        active = Sum()
        for upload in uploads:
            gamma = self.gamma_of(upload.client)
            active = added(active, upload.vector, gamma=gamma, devices=1)
        return active

    def counted(
        self, state: Kept, round: Round, uploads: Iterable[Upload], at_work: Collection[int] = ()
    ) -> Kept:
        """Return the state with the round counted as offline for devices that were available.

        Devices ``at_work`` are in contact, and those of ``uploads`` were.
        """
        available = {c for n in range(self.servers) for c in self.available(state, round, n)}
        waiting = sorted(available - {*at_work} | {*round.asked})
        waited = {client: state.offline.get(client, 0) + 1 for client in waiting}
        contacted = {upload.client: 0 for upload in uploads}
        return replace(state, offline={**state.offline, **waited, **contacted})
