"""FedBCD, async-cloud: each cloud server has its own model, and the first few to finish mix.

Cloud server n sends its own z_n to its active devices; they answer as in ``fedbcd``, with z_n
instead of z. In round t the first B cloud servers whose devices have answered mix, K_z times
(with ``reduce="mean"``, the sum of (2) is divided by the sum of its gamma_i):

    w   = mean of their z_n                                                     (1)
    z_n <- w - eta_z sum_{i in Q_n} gamma_i (w - x_i)   for each of them        (2)

and ask again; the others keep z_n and their devices' finished or unfinished work, with which they
take part in a later round. The model of the run is the mean of all z_n.

rigorous     (Appendix A) the others take (2) too, with w = z_n, once their devices have answered,
             and ask again: every cloud server steps in every round
staleness    rounds in which each cloud server mixes at least once: the round waits for a cloud
             server that would exceed them, which mixes beside the first B others
order        "virtual": by the clock of ``latency``, so that a seed fixes the run. The devices of a
             cloud server begin when it mixed last; a mix sets the clocks of its cloud servers to
             the latest of them. "arrival": by the real arrival of replies

B = V = 1 is sync-cloud FedBCD. With B = V > 1 the cloud servers' models still differ, as (2) pulls
each to its own devices.

By arrival, a cloud server is done when all the devices it asked have answered, or after
``timeout`` seconds. A later reply counts in its cloud server's next mix, and its device is not
asked again before that; so no reply is lost. A dead device's request ends with Flower's error
reply.

The sums of (2) are kept as in sync-cloud, which also says what happens to devices that are new or
lost their state. All cloud servers share a model's running statistics: those of the last mix.

Reference: Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and
Personalized Models", AAAI 2021, eq. 6, Section 3.1 and Appendix A.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fl_strategies.bcd.fedbcd import BookedStrategy, Sum, mean, server_rule
from fl_strategies.bcd.fedbcd import ServerState as BookedState
from fl_strategies.core.hyperparameters import choice, flag, number
from fl_strategies.core.records import BadReply, Uploads
from fl_strategies.core.vectors import Vector
from fl_strategies.messages.wire import decode
from fl_strategies.server.algorithm import Card
from fl_strategies.server.replies import content_as, contents, lost_request, sender

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, ConfigRecord, Message
    from flwr.serverapp import Grid

    from fl_strategies.core.layout import Arrays
    from fl_strategies.messages.wire import Content
    from fl_strategies.server.replies import Asked, Request

PAUSE = 0.5
"""Seconds between two looks for replies, while none come."""


@dataclass
class Phase:
    """A cloud server's devices at work: who was asked, what came back, and when it was done."""

    server_round: int
    asked: Asked
    """With late ones of earlier phases once they answer in this one."""
    deadline: float
    buffers: Arrays
    """What its devices were sent beside the cloud server's model."""
    waiting: set[str] = field(default_factory=set)
    """Ids of this phase's messages without a reply."""
    replies: list[Message] = field(default_factory=list)
    end: float | None = None


@dataclass(frozen=True)
class Late:
    """A request without a reply: its round and its cloud server."""

    request: Request
    server_round: int
    cloud: int


@dataclass(frozen=True)
class ServerState(BookedState):
    """What the server keeps beside, by cloud server: z_n [d], its clock, the round of its last mix.

    ``unfinished`` is its devices' work under way: the round in which they were asked, these
    clients, the buffers. A run that resumes from a checkpoint asks for it again, and by the round's
    random streams gets what it would have got.
    """

    z: tuple[Vector, ...] = ()
    clocks: tuple[float, ...] = ()
    mixed: tuple[int, ...] = ()
    unfinished: Mapping[int, Sequence[Any]] = field(default_factory=dict)


class FedBCDAsync(BookedStrategy):
    """Async-cloud FedBCD's server half; see the module's docstring.

    With ``reduce="sum"`` its bound is on one cloud server's devices.
    """

    algorithm = "fedbcd-async"
    client_module = "clients.fedbcd"
    card = Card(
        "FedBCD, async-cloud",
        "FedBCD with several cloud servers; the first to finish mix their models",
        when="several cloud servers share the clients, and some are slow",
        keeps="model, last iterate",
        paper="Wu et al., AAAI 2021",
    )
    step_per_cloud = True

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first is not None and self.first > self.servers:
            raise ValueError(
                f"first must be an integer >= 1 and <= {self.servers}, got {self.first}: there are"
                f" {self.servers} cloud servers"
            )
        if self.rigorous and self.order == "arrival":
            raise ValueError('rigorous needs order="virtual", got order="arrival"')
        self._phases: dict[int, Phase] = {}
        self.underway: dict[str, Late] = {}
        self._ready: list[int] = []
        self._alone: list[int] = []
        self._mixing: dict[int, Phase] = {}
        self._started: float | None = None

    @property
    def many(self) -> int:
        """B, the cloud servers that mix in a round."""
        return -(-self.servers // 2) if self.first is None else self.first

    def first_state(self, theta: Vector) -> ServerState:
        clouds = range(self.servers)
        return ServerState(
            {}, theta, books=(Sum(),) * self.servers, clocks=tuple(0.0 for _ in clouds)
        )

    def begin(self, state: ServerState, theta: Vector) -> ServerState:
        found: ServerState = super().begin(state, theta)
        self._phases, self.underway, self._started = {}, {}, None
        if not (found.z and np.array_equal(theta, self._mean(found.z))):
            mixed = (self.run.rounds_before,) * self.servers
            return replace(found, z=(theta,) * self.servers, mixed=mixed, unfinished={})
        return found  # it continues from where it ended

    def _mean(self, zs: Sequence[Vector]) -> Vector:
        """Return the mean of the cloud servers' models, as it travels."""
        assert self.layout is not None
        arrays = self.layout.unpack(np.asarray(mean(zs)), self._model)
        return self.layout.pack(arrays)

    def sent(self, client: int) -> Vector:
        return self.state.z[self.state.cloud_of[client]]

    @property
    def cloud_models(self) -> list[ArrayRecord]:
        """Each cloud server's model, 0 to V - 1."""
        last = self.result.arrays
        buffers = {name: decode(last[name]) for name in self.untrained}
        return [self.model_record(z, buffers) for z in self.state.z]

    # ---- one round ----------------------------------------------------------------------------

    def train_round(
        self,
        server_round: int,
        arrays: ArrayRecord,
        grid: Grid,
        timeout: float,
        config: ConfigRecord,
    ) -> ArrayRecord | None:
        self.read_model(arrays)
        if self._started is None:
            self._started = time.monotonic() - self.state.seconds
        number = self.run.rounds_before + server_round
        requests = self._ask(number, config, grid, timeout)
        if self.order == "virtual":
            self._answered(grid.send_and_receive(requests, timeout=timeout))
        else:
            self._push(requests, grid)
        while not self._choose(number):
            self._pull(grid)
        self._mixing = {n: self._phases.pop(n) for n in self._ready + self._alone}
        return self.aggregate_train(server_round, self._replies())[0]

    def _ask(
        self, server_round: int, config: ConfigRecord, grid: Grid, timeout: float
    ) -> list[Message]:
        """Begin a phase of each cloud server that has none; return the requests of all."""
        nodes = self.nodes.wait(grid, self.clients_needed)
        self.check_enough(len(nodes), "connected")
        self.state = self.meet(self.state, nodes)
        unfinished = dict(self.state.unfinished)
        busy = {client for late in self.underway.values() for client in late.request.clients}
        free = {client: node for client, node in nodes.items() if client not in busy}
        requests: list[Message] = []
        for n in range(self.servers):
            if n in self._phases or not self.state.devices(n, nodes):
                continue
            begun, chosen = server_round, self.active(server_round, n, free)
            buffers = {name: self._model[name] for name in self.untrained}
            if n in unfinished:
                begun, before, buffers = unfinished[n]
                chosen = [client for client in before if client in free]
            model = self.model_record(self.state.z[n], buffers)
            requests += self.requests(begun, model, config, nodes, chosen, "train")
            rounds = dict.fromkeys(chosen, begun)
            deadline = time.monotonic() + timeout
            asked = replace(self._asked, rounds=rounds)
            self._phases[n] = Phase(begun, asked, deadline, buffers)
        return requests

    def _choose(self, server_round: int) -> bool:
        """Decide who mixes; return whether enough cloud servers are done for that."""
        done = {n: phase.end for n, phase in self._phases.items() if phase.end is not None}
        bound = self.staleness or server_round + 1
        overdue = [n for n in self._phases if server_round - self.state.mixed[n] >= bound]
        wanted = min(self.many, len(self._phases))
        if not set(overdue) <= done.keys() or len(done) < wanted:
            return False
        others = sorted(done.keys() - set(overdue), key=lambda n: (done[n], n))
        self._ready = sorted(overdue + others[: max(wanted - len(overdue), 0)])
        self._alone = sorted(done.keys() - set(self._ready)) if self.rigorous else []
        return True

    def _replies(self) -> list[Message]:
        """Return the replies of the phases that end, and take note of who was asked in them."""
        phases = list(self._mixing.values())
        self._asked = replace(
            self._asked,
            clients=[client for phase in phases for client in phase.asked.clients],
            rounds={k: v for phase in phases for k, v in phase.asked.rounds.items()},
            requests=[request for phase in phases for request in phase.asked.requests],
            bytes_down=sum(phase.asked.bytes_down for phase in phases),
            started=min((phase.asked.started for phase in phases), default=time.monotonic()),
        )
        return [reply for phase in phases for reply in phase.replies]

    def aggregate(
        self, state: ServerState, theta: Vector, uploads: Uploads
    ) -> tuple[Vector, ServerState]:
        state, step = self.with_uploads(state, uploads), self.step(uploads.round)
        zs, mixed = list(state.z), list(state.mixed)
        for group in [self._ready, *([n] for n in self._alone)]:
            books = [state.books[n] for n in group]
            for n, z in zip(
                group, server_rule([state.z[n] for n in group], books, **step), strict=True
            ):
                zs[n] = z
        for n in self._ready:
            mixed[n] = uploads.round
        return mean(zs), replace(state, z=tuple(zs), mixed=tuple(mixed))

    def ended(self, state: ServerState, uploads: Uploads) -> ServerState:
        at_work = {
            n: (p.server_round, list(p.asked.clients), p.buffers) for n, p in self._phases.items()
        }
        begun = {**at_work, **self._mixing}
        # work whose clients are not connected stays unfinished
        waiting = {n: work for n, work in state.unfinished.items() if n not in begun}
        unfinished = {**waiting, **at_work}
        if self.order == "arrival":
            assert self._started is not None
            seconds = time.monotonic() - self._started
            return replace(state, seconds=seconds, unfinished=unfinished)
        ends = {n: phase.end or 0.0 for n, phase in self._mixing.items()}
        seconds = max([state.seconds, *(ends[n] for n in self._ready)])
        clocks = list(state.clocks)
        for n in ends:
            clocks[n] = seconds if n in self._ready else ends[n]
        return replace(state, seconds=seconds, clocks=tuple(clocks), unfinished=unfinished)

    # ---- by the virtual clock -----------------------------------------------------------------

    def _answered(self, replies: Iterable[Message]) -> None:
        """Hand each reply to the phase in which its node was asked, and end the new phases."""
        new = {n: phase for n, phase in self._phases.items() if phase.end is None}
        for reply in replies:
            node = reply.metadata.src_node_id
            asked = [phase for phase in new.values() if _is_of(reply, phase.asked)]
            asked = asked or [phase for phase in new.values() if node in phase.asked.by_node]
            for phase in (asked or list(new.values()))[:1]:  # a stray reply goes to any
                phase.replies.append(reply)
        for n, phase in new.items():
            took = self.duration(phase.server_round, phase.asked.clients, self._work(phase))
            phase.end = self.state.clocks[n] + took

    def _work(self, phase: Phase) -> dict[int, float]:
        """Return the K that each client's first reply reports, where that can be read."""
        work: dict[int, float] = {}

        def reported(client: int, content: Content) -> float:
            return float(self.read(client, content)[0].numbers["work"])

        for reply in phase.replies:
            try:
                found = contents(reply, sender(reply, phase.asked))
            except BadReply:  # which is logged when the phase is used
                continue
            for client, content in found.items():
                if client in phase.asked.clients and client not in work:
                    work[client] = 1.0
                    with suppress(BadReply):
                        work[client] = content_as(client, content, reported)
        return work

    # ---- by arrival ---------------------------------------------------------------------------

    def _push(self, requests: list[Message], grid: Grid) -> None:
        asked = {
            id(request.about): (request, n, phase)
            for n, phase in self._phases.items()
            for request in phase.asked.requests
            if phase.end is None
        }
        # a request that Flower could not send has the id None, and all of them may have no id
        for message_id, message in zip(grid.push_messages(requests), requests, strict=False):
            if not message_id:
                continue
            request, n, phase = asked[id(message.metadata)]
            self.underway[message_id] = Late(request, phase.server_round, n)
            phase.waiting.add(message_id)

    def _pull(self, grid: Grid) -> None:
        """Take in the replies that have come, end the phases that are complete or out of time."""
        replies = list(grid.pull_messages(list(self.underway)))
        for reply in replies:
            self._arrived(reply)
        now = time.monotonic()
        underway = {late.cloud for late in self.underway.values()}
        for n, phase in self._phases.items():
            # with no reply yet, one that is late from an earlier phase is waited for
            complete = not phase.waiting and (phase.replies or n not in underway)
            if phase.end is None and (complete or now >= phase.deadline):
                phase.end = now
        if not replies:
            time.sleep(PAUSE)

    def _arrived(self, reply: Message) -> None:
        about = reply.metadata
        by_node = (k for k, late in self.underway.items() if late.request.node == about.src_node_id)
        # Flower's replies name the message, its own error replies, which come from no node, too
        late = self.underway.pop(about.reply_to_message_id or next(by_node, ""), None)
        if late is None or late.cloud not in self._phases:
            return
        phase, request = self._phases[late.cloud], late.request
        phase.waiting &= self.underway.keys()
        phase.replies.append(reply)
        if request not in phase.asked.requests:
            phase.asked = replace(
                phase.asked,
                clients=[*dict.fromkeys([*phase.asked.clients, *request.clients])],
                rounds={**phase.asked.rounds, **dict.fromkeys(request.clients, late.server_round)},
                requests=[*phase.asked.requests, request],
            )


def _is_of(reply: Message, asked: Asked) -> bool:
    """Return whether ``reply`` answers one of the requests ``asked``, or says that it cannot."""
    try:
        sender(reply, asked)
    except BadReply:
        return lost_request(reply, asked) is not None
    return True
