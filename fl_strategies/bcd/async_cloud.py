"""Async-cloud: cloud servers with their own models, of which a round waits for the first few.

The protocol of async-cloud FedBCD and FedBCD-I. Cloud server n sends its own z_n to its active
devices. In round t the first B cloud servers whose devices have answered are ready: they mix their
models by the weights a_nm, each takes its step, and they ask again. The others keep z_n and their
devices' finished or unfinished work, with which they take part in a later round. The model of the
run is the mean of all z_n.

mixing       a_nm; by default 1/B for all ready cloud servers: ``fl_strategies.bcd.mixing``
rigorous     (Appendix A) the others step too, from w = z_n, once their devices have answered, and
             ask again: every cloud server steps in every round
staleness    rounds in which each cloud server mixes at least once: the round waits for a cloud
             server that would exceed them, which mixes in addition to the first B others
order        "virtual": by the virtual clock, so that a seed fixes the run. The devices of a cloud
             server begin when it mixed last; a mix sets the clocks of its cloud servers to the
             latest of them. "arrival": by the real arrival of replies

By arrival, a cloud server is done when all the devices it asked have answered, or after
``timeout`` seconds. A later reply counts in its cloud server's next mix, and its device is not
asked again before that; so no reply is lost. A dead device's request ends with Flower's error
reply.

All cloud servers share a model's running statistics: those of the last mix.

Reference: Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and
Personalized Models", AAAI 2021, eq. 6, Section 3.1 and Appendix A.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fl_strategies.bcd.clouds import CloudState, CloudStrategy
from fl_strategies.bcd.fedbcd import Sum, server_rule
from fl_strategies.bcd.mixing import Mixing, check_mixing, is_mixing, matrix, mean
from fl_strategies.core.hyperparameters import choice, flag, number, option
from fl_strategies.core.records import Round, Upload
from fl_strategies.core.vectors import Vector
from fl_strategies.messages.wire import decode
from fl_strategies.server.algorithm import Next
from fl_strategies.server.asked import Asked
from fl_strategies.server.phases import Phase, as_one_phase

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, ConfigRecord, Message
    from flwr.serverapp import Grid


@dataclass(frozen=True)
class AsyncState(CloudState):
    """What the server keeps in addition, by cloud server: z_n [d], its clock, its last mix's round.

    ``unfinished`` is its devices' work under way: the round in which they were asked, these
    clients, the buffers. A run that resumes from a checkpoint asks for it again, and by the round's
    random streams gets what it would have got. Of the current round: which cloud servers are
    ``ready`` and mix, which step ``alone``, and when their work ended.
    """

    z: tuple[Vector, ...] = ()
    clocks: tuple[float, ...] = ()
    mixed: tuple[int, ...] = ()
    unfinished: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    ready: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    ends: Mapping[int, float] = field(default_factory=dict)

    @property
    def at_work(self) -> set[int]:
        """The devices whose work is under way."""
        return {client for _, clients, _ in self.unfinished.values() for client in clients}


class AsyncCloudStrategy(CloudStrategy):
    """Base of the async-cloud strategies; see the module's docstring.

    With ``reduce="sum"`` the bound is on one cloud server's devices.
    """

    step_per_cloud = True
    overlaps = True

    first: int | None = number(
        default=None,
        about="B <= servers, cloud servers that mix in a round; by default half of them, rounded"
        " up.",
        integer=True,
        low=1,
    )
    rigorous: bool = flag(
        default=False, about='Whether the others take a step on their own; needs order="virtual".'
    )
    staleness: int | None = number(
        default=None,
        about="Rounds in which each cloud server mixes at least once; by default there is no such"
        " bound.",
        integer=True,
        low=1,
    )
    order: Literal["virtual", "arrival"] = choice(
        default="virtual",
        choices=("virtual", "arrival"),
        about="Which cloud servers count as the first.",
    )

    mixing: Mixing | None = option(
        default=None,
        type_name="function or sequence of matrices",
        accepts=is_mixing,
        about="a_nm, by which ready cloud servers mix: a function of the round and the ready cloud"
        " servers that returns a matrix [V, V], or a sequence of symmetric matrices, used in turn"
        " (for cloud servers that are not ready, a ready one takes its own model). A matrix is"
        " doubly stochastic, and the identity for cloud servers that are not ready. By default"
        " 1/B. The function's result for the first B cloud servers is checked beforehand.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first is not None and self.first > self.servers:
            raise ValueError(
                f"first must be an integer >= 1 and <= {self.servers}, got {self.first}: there are"
                f" {self.servers} cloud servers"
            )
        check_mixing(self.mixing, self.servers, self.many)
        if self.rigorous and self.order == "arrival":
            raise ValueError('rigorous needs order="virtual", got order="arrival"')

    @property
    def model_from_state(self) -> bool:
        return True  # the cloud servers' models

    @property
    def many(self) -> int:
        """B, the cloud servers that mix in a round."""
        return -(-self.servers // 2) if self.first is None else self.first

    def begin(self, state: AsyncState, round: Round, num_rounds: int) -> AsyncState:
        begun: AsyncState = super().begin(state, round, num_rounds)
        if not (begun.z and np.array_equal(round.theta, as_sent(mean(begun.z), round))):
            zs, mixed = (round.theta,) * self.servers, (round.number,) * self.servers
            return replace(begun, z=zs, mixed=mixed, unfinished={})
        return begun  # it continues from where it ended

    @property
    def cloud_models(self) -> list[ArrayRecord]:
        """Each cloud server's model, 0 to V - 1."""
        last = self.result.arrays
        buffers = {name: decode(last[name]) for name in self.opened_model.layout.buffers}
        return [self.opened_model.with_vector(z, buffers).record for z in self.state.z]

    # ---- the rule -----------------------------------------------------------------------------

    def stepped(
        self, state: AsyncState, round: Round, uploads: Sequence[Upload], sums: Sequence[Sum]
    ) -> Next:
        """Return the result of the round: ready cloud servers mix, and step by their ``sums``."""
        who = [*state.ready, *state.alone]
        a = matrix(self.mixing, self.servers, round.number, state.ready).tolist()
        weights = [tuple(a[n][m] for m in who) for n in who]
        step = self.step(round.number) | {"weights": weights}
        models = server_rule([state.z[n] for n in who], [sums[n] for n in who], **step)
        zs, mixed = list(state.z), list(state.mixed)
        for n, z in zip(who, models, strict=True):
            zs[n] = z
        for n in state.ready:
            mixed[n] = round.number
        state = replace(state, z=tuple(zs), mixed=tuple(mixed))
        return mean(zs), *self.timed(state, round, uploads)

    def ended(self, state: AsyncState, round: Round, uploads: Iterable[Upload]) -> AsyncState:
        seconds = max([state.seconds, *(state.ends[n] for n in state.ready)])
        clocks = list(state.clocks)
        if self.order == "virtual":
            for n, end in state.ends.items():
                clocks[n] = seconds if n in state.ready else end
        return replace(state, seconds=seconds, clocks=tuple(clocks))

    # ---- a round (``server/phases.py``) -------------------------------------------------------

    @property
    def by_arrival(self) -> bool:
        return self.order == "arrival"

    def open_phases(self, grid: Grid, timeout: float, config: ConfigRecord) -> Asked:
        """Open a phase of each cloud server that has none; return one of nobody."""
        nodes = self.nodes.wait(grid, self.clients_needed)
        self.check_enough(len(nodes), "connected")
        self.state = state = self.on_connect(self.state, self.nodes.known)
        busy = self.phases.busy
        free = {client: node for client, node in nodes.items() if client not in busy}
        round, model = self.make_round(self.run.number, free), self.opened_model
        for n in range(self.servers):
            if n in self.phases.open or not state.devices(n, nodes):
                continue
            begun, chosen = round.number, self.active(state, round, n)
            buffers = {name: model.arrays[name] for name in model.layout.buffers}
            if n in state.unfinished:
                begun, before, buffers = state.unfinished[n]
                chosen = [client for client in before if client in free]
            own = replace(round, number=begun, theta=state.z[n], asked=tuple(chosen))
            sent = model.with_vector(state.z[n], buffers)
            asked, until = self.send(own, sent, config, nodes), time.monotonic() + timeout
            self.phases.open[n] = Phase(asked, sent, state.clocks[n], deadline=until)
        return self.send(round, model, config, nodes)

    def keep_up(self, ended: Sequence[int], grid: Grid, config: ConfigRecord) -> None:
        """Open no other phase: a cloud server asks again once it has mixed."""

    def phase_seconds(self, cloud: int, phase: Phase) -> float:
        """Return how long the cloud server's devices work, by the K that they report."""
        round = phase.asked.round
        work = {reply.client: float(reply.numbers["work"]) for reply in phase.usable_replies()}
        return self.duration(round.seed, round.number, round.asked, work)

    def first_ended(self, ended: Sequence[int]) -> list[int]:
        """Return which cloud servers mix, of those that ``ended``; none if too few did."""
        number, open_, mixed = self.run.number, self.phases.open, self.state.mixed
        bound = self.staleness or number + 1
        overdue = [n for n in open_ if number - mixed[n] >= bound]
        wanted = min(self.many, len(open_))
        if not {*overdue} <= {*ended} or len(ended) < wanted:
            return []
        others = [n for n in ended if n not in overdue]
        return sorted(overdue + others[: max(wanted - len(overdue), 0)])

    def close_phases(self, asked: Asked, keys: Sequence[int]) -> tuple[Asked, list[Message]]:
        """Close the phases of the cloud servers that mix; with ``rigorous`` all others, too."""
        ready = tuple(keys)
        alone = sorted(self.phases.open.keys() - {*ready}) if self.rigorous else []
        closed = dict(zip([*ready, *alone], self.phases.close([*ready, *alone]), strict=True))
        at_work = {n: unfinished(phase) for n, phase in self.phases.open.items()}
        # work whose clients are not connected stays unfinished
        waiting = {n: work for n, work in self.state.unfinished.items() if n not in closed}
        self.state = replace(
            self.state,
            ready=ready,
            alone=tuple(alone),
            ends={n: phase.end for n, phase in closed.items()},
            unfinished={**waiting, **at_work},
        )
        return as_one_phase([*closed.values()], asked)


def unfinished(phase: Phase) -> list[Any]:
    """Return the round in which a cloud server's devices were asked, these, and their buffers."""
    buffers = {name: phase.model.arrays[name] for name in phase.model.layout.buffers}
    return [phase.asked.round.number, list(phase.asked.clients), buffers]


def as_sent(vector: Vector, round: Round) -> Vector:
    """Return ``vector`` [d] as it travels, in the model's types."""
    layout = round.layout
    assert layout is not None
    return layout.pack(
        layout.unpack(np.asarray(vector), dict.fromkeys(layout.buffers, np.empty(0)))
    )
