"""FedBCD, async-cloud: cloud servers with models of their own, of which the first few mix.

Cloud server n asks its active devices with its own z_n; they answer as in ``fl_strategies.fedbcd``
with z_n in the place of z. In round t the first B cloud servers whose devices have answered mix,
K_z times (with ``reduce="mean"``, the sum of (2) is divided by the sum of its gamma_i):

    w   = mean of their z_n                                                     (1)
    z_n <- w - eta_z sum_{i in Q_n} gamma_i (w - x_i)   for each of them        (2)

and ask again; the others keep z_n and their devices' finished or unfinished work, with which they
take part in a later round. The model of the run is the mean of all z_n.

rigorous     (Appendix A) the others take (2) too, with w = z_n, once their devices have answered,
             and ask again: every cloud server steps in every round
staleness    no cloud server goes longer without a mix: one that would is waited for, and mixes
             beside the first others even if these are B already
order        "virtual": by the clock of ``fl_strategies.latency``, so that a seed fixes the run. A
             cloud server's devices begin when it mixed last, and after a mix the clocks of those in
             it are the latest of theirs. "arrival": by the replies as they really come in

B = V = 1 is sync-cloud FedBCD. With B = V > 1 the cloud servers' models still differ, as (2) pulls
each to its own devices.

By arrival, a cloud server is done when all the devices it asked have answered, or after
``timeout`` seconds. A reply that comes later counts in its cloud server's next mix, and its device
is not asked again before; so none is lost. A dead device's request ends with Flower's error reply.

The sums of (2) are kept, and devices that are new or lost their state treated, as in sync-cloud.
Running statistics of a model are common to all cloud servers: those of the last mix.

Reference: Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and
Personalized Models", AAAI 2021, eq. 6, Section 3.1 and Appendix A.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from fl_strategies.clouds import CloudOptions
from fl_strategies.fedbcd import BookedStrategy, mean, server_rule
from fl_strategies.replies import gone, only, read, sender
from fl_strategies.schedules import check, one_of
from fl_strategies.strategy import Upload
from fl_strategies.subproblem import Vector
from fl_strategies.wire import BadReply, decode

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata
    from flwr.serverapp import Grid

    from fl_strategies.layout import Arrays
    from fl_strategies.replies import Asked

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
class Request:
    """A message on its way: to which node, as which client, in which round, of which cloud."""

    about: Metadata
    node: int
    client: int
    server_round: int
    cloud: int


class FedBCDAsync(BookedStrategy):
    """Async-cloud FedBCD's server half; see the module's docstring.

    Parameters
    ----------
    first : int in [1, servers], optional
        B, cloud servers that mix in a round; by default half of them, rounded up.
    rigorous : bool (default False)
        Whether the others take a step on their own; needs ``order="virtual"``.
    staleness : int >= 1, optional
        Rounds in which each cloud server mixes at least once; by default there is no such bound.
    order : "virtual" or "arrival" (default "virtual")
        Which cloud servers count as the first.
    **options
        Those of :class:`fl_strategies.clouds.CloudStrategy`; with ``reduce="sum"`` its bound is on
        one cloud server's devices.

    Raises
    ------
    ValueError
        For a knob outside its range.
    """

    algorithm = "fedbcd-async"
    step_per_cloud = True
    saved = ("_z", "_clocks", "_mixed", "unfinished")

    def __init__(
        self,
        *,
        first: int | None = None,
        rigorous: bool = False,
        staleness: int | None = None,
        order: Literal["virtual", "arrival"] = "virtual",
        **options: Unpack[CloudOptions],
    ) -> None:
        super().__init__(**options)
        self.first = -(-self.servers // 2) if first is None else first
        if first is not None:
            check("first", first, low=1, high=self.servers, integer=True)
        if staleness is not None:
            check("staleness", staleness, low=1, integer=True)
        one_of("order", order, ("virtual", "arrival"))
        if rigorous and order == "arrival":
            raise ValueError('rigorous needs order="virtual", got order="arrival"')
        self.rigorous, self.staleness, self.order = rigorous, staleness, order
        clouds = range(self.servers)
        self._z: list[Vector] = []
        self._next_z: list[Vector] = []
        self._phases: dict[int, Phase] = {}
        self._unfinished: dict[int, Sequence[Any]] = {}
        self._underway: dict[str, Request] = {}
        self._clocks, self._mixed = [0.0 for _ in clouds], [0 for _ in clouds]
        self._ready: list[int] = []
        self._alone: list[int] = []
        self._mixing: dict[int, Phase] = {}
        self._started = 0.0

    def begin(self, theta: Vector) -> None:
        super().begin(theta)
        if self._z and np.array_equal(theta, mean(self._z).astype(theta.dtype)):
            self._unfinished = self.unfinished  # it goes on from where it ended
        else:
            self._z, self._unfinished = [theta] * self.servers, {}
            self._mixed = [self._rounds_before] * self.servers
        self._phases, self._underway = {}, {}
        self._started = time.monotonic() - self._seconds

    def sent(self, theta: Vector, client: int) -> Vector:
        return self._z[self._cloud_of[client]]

    @property
    def cloud_models(self) -> list[ArrayRecord]:
        """Each cloud server's model, 0 to V - 1."""
        last = self.result.arrays
        buffers = {name: decode(last[name]) for name in self.buffers}
        return [self.model_record(z, buffers) for z in self._z]

    @property
    def unfinished(self) -> dict[int, Sequence[Any]]:
        """By cloud server, the round in which its devices were asked, these clients, the buffers.

        What a checkpoint holds of work under way: a run that goes on asks for it again, and by the
        round's random streams gets what it would have got.
        """
        return {
            n: (p.server_round, list(p.asked.clients.values()), p.buffers)
            for n, p in self._phases.items()
        }

    @unfinished.setter
    def unfinished(self, work: Mapping[int, Sequence[Any]]) -> None:
        self._unfinished = dict(work)
        self._started = time.monotonic() - self._seconds

    # ---- one round ----------------------------------------------------------------------------

    def train_round(
        self,
        server_round: int,
        arrays: ArrayRecord,
        grid: Grid,
        timeout: float,
        config: ConfigRecord,
    ) -> ArrayRecord | None:
        self._read_model(arrays)
        number = self._rounds_before + server_round
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
        nodes = self.nodes.wait(grid, max(self.min_available_nodes, self.min_train_nodes))
        self.place()
        busy = {request.client for request in self._underway.values()}
        free = {client: node for client, node in nodes.items() if client not in busy}
        requests: list[Message] = []
        for n in range(self.servers):
            if n in self._phases or not self.devices(n, nodes):
                continue
            begun, chosen = server_round, self.active(server_round, n, free)
            buffers = {name: self._model[name] for name in self.buffers}
            if n in self._unfinished:
                begun, before, buffers = self._unfinished.pop(n)
                chosen = [client for client in before if client in free]
            model = self.model_record(self._z[n], buffers)
            requests += self._requests(begun, model, config, nodes, chosen, "train")
            rounds = dict.fromkeys(chosen, begun)
            deadline = time.monotonic() + timeout
            asked = replace(self._asked, rounds=rounds)
            self._phases[n] = Phase(begun, asked, deadline, buffers)
        return requests

    def _choose(self, server_round: int) -> bool:
        """Decide who mixes; return whether enough cloud servers are done for that."""
        done = {n: phase.end for n, phase in self._phases.items() if phase.end is not None}
        bound = self.staleness or server_round + 1
        overdue = [n for n in self._phases if server_round - self._mixed[n] >= bound]
        wanted = min(self.first, len(self._phases))
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
            clients={k: v for phase in phases for k, v in phase.asked.clients.items()},
            rounds={k: v for phase in phases for k, v in phase.asked.rounds.items()},
            requests={k: v for phase in phases for k, v in phase.asked.requests.items()},
            bytes_down=sum(phase.asked.bytes_down for phase in phases),
            started=min((phase.asked.started for phase in phases), default=time.monotonic()),
        )
        return [reply for phase in phases for reply in phase.replies]

    def aggregate(
        self, server_round: int, theta: Vector, uploads: Iterable[Upload], used: int
    ) -> Vector:
        self._next, step = self.booked(uploads), self.step(server_round)
        self._next_z = list(self._z)
        for group in [self._ready, *([n] for n in self._alone)]:
            books = [self._next[n] for n in group]
            mixed = server_rule([self._z[n] for n in group], books, **step)
            for n, z in zip(group, mixed, strict=True):
                self._next_z[n] = np.asarray(z, theta.dtype)
        return mean(self._next_z)

    def commit(self, server_round: int) -> None:
        super().commit(server_round)
        self._z = self._next_z
        for n in self._ready:
            self._mixed[n] = server_round

    def end(self, server_round: int) -> float:
        if self.order == "arrival":
            return time.monotonic() - self._started
        ends = {n: phase.end or 0.0 for n, phase in self._mixing.items()}
        mixed = max([self._seconds, *(ends[n] for n in self._ready)])
        for n in ends:
            self._clocks[n] = mixed if n in self._ready else ends[n]
        return mixed

    # ---- by the virtual clock -----------------------------------------------------------------

    def _answered(self, replies: Iterable[Message]) -> None:
        """Hand each reply to the phase in which its node was asked, and end the new phases."""
        new = {n: phase for n, phase in self._phases.items() if phase.end is None}
        for reply in replies:
            node = reply.metadata.src_node_id
            asked = [
                phase
                for phase in new.values()
                if node in phase.asked.clients or gone(reply, phase.asked) is not None
            ]
            for phase in asked or list(new.values())[:1]:  # a stray one is logged with any
                phase.replies.append(reply)
        for n, phase in new.items():
            clients = phase.asked.clients.values()
            took = self.duration(phase.server_round, clients, self._work(phase))
            phase.end = self._clocks[n] + took

    def _work(self, phase: Phase) -> dict[int, float]:
        """Return the K that each client's first reply reports, where that can be used."""
        work: dict[int, float] = {}
        for reply in phase.replies:
            try:
                client = sender(reply, phase.asked)
                if client not in work:
                    work[client] = 1.0
                    content = read(client, reply, self._check_upload)
                    work[client] = only(content.metric_records)["work"]
            except BadReply:  # which is logged when the phase is used
                continue
        return work

    # ---- by arrival ---------------------------------------------------------------------------

    def _push(self, requests: list[Message], grid: Grid) -> None:
        cloud_of = {
            node: (n, phase)
            for n, phase in self._phases.items()
            for node in phase.asked.clients
            if phase.end is None
        }
        # a request that Flower could not send has the id None, and all of them may have no id
        for message_id, message in zip(grid.push_messages(requests), requests, strict=False):
            if not message_id:
                continue
            node = message.metadata.dst_node_id
            n, phase = cloud_of[node]
            client = phase.asked.clients[node]
            self._underway[message_id] = Request(
                message.metadata, node, client, phase.server_round, n
            )
            phase.waiting.add(message_id)

    def _pull(self, grid: Grid) -> None:
        """Take in the replies that have come, end the phases that are complete or out of time."""
        replies = list(grid.pull_messages(list(self._underway)))
        for reply in replies:
            self._arrived(reply)
        now = time.monotonic()
        underway = {request.cloud for request in self._underway.values()}
        for n, phase in self._phases.items():
            # with no reply yet, one that is late from an earlier phase is waited for
            complete = not phase.waiting and (phase.replies or n not in underway)
            if phase.end is None and (complete or now >= phase.deadline):
                phase.end = now
        if not replies:
            time.sleep(PAUSE)

    def _arrived(self, reply: Message) -> None:
        about = reply.metadata
        by_node = (key for key, r in self._underway.items() if r.node == about.src_node_id)
        # Flower's replies name the message, its own error replies, which come from no node, too
        request = self._underway.pop(about.reply_to_message_id or next(by_node, ""), None)
        if request is None or request.cloud not in self._phases:
            return
        phase = self._phases[request.cloud]
        phase.waiting &= self._underway.keys()
        phase.replies.append(reply)
        phase.asked = replace(
            phase.asked,
            clients=phase.asked.clients | {request.node: request.client},
            rounds={**phase.asked.rounds, request.client: request.server_round},
            requests={**phase.asked.requests, request.node: request.about},
        )
