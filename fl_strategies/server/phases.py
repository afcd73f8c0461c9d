"""The asynchronous way of a round: phases of several rounds are open at a time.

A phase opens when its clients are asked, ends when their replies are there, and closes when these
are used. A round opens phases, looks at each one as it ends, the first first, and closes some once
enough have ended (``FederatedStrategy._overlapping``). What differs is the algorithm's if a cloud
server has a phase (``bcd/async_cloud.py``), else the pace's, which has one of each client at work:

    open_phases     opens the round's phases
    keep_up         opens others when one has ended
    phase_seconds   how long a phase lasts by the virtual clock
    first_ended     which phases close, once enough have ended
    close_phases    what becomes of their replies, and of the open phases

By the virtual clock clients work as soon as they are asked, and their replies are held until they
are due. By arrival a phase ends when its last reply has come.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fl_strategies.core.records import BadReply, Reply
from fl_strategies.messages.wire import Content
from fl_strategies.server.asked import Asked, Request
from fl_strategies.server.model import Model
from fl_strategies.server.reading import reply_of
from fl_strategies.server.replies import contents, lost_request, sender
from fl_strategies.server.waiting import PAUSE, Watch, send_and_receive

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid


@dataclass
class Phase:
    """Clients at work: who was asked, what came back, and when."""

    asked: Asked
    """With late ones of earlier phases once they answer in this one."""
    model: Model
    """What the clients train, before any rounding."""
    since: float | None = 0.0
    """The virtual second in which they begin; None until they have a place."""
    took: float | None = None
    """The virtual seconds that they work, once their replies are there."""
    deadline: float = math.inf
    """By arrival, when the phase ends, whoever is missing."""
    arrived: float | None = None
    """By arrival, the second of the run in which the phase ended."""
    waiting: set[str] = field(default_factory=set)
    """Ids of this phase's messages without a reply."""
    replies: list[Message] = field(default_factory=list)
    usable: int | None = None
    """How many replies can be used, once that was looked at."""

    @property
    def end(self) -> float | None:
        """The second of the run in which the phase ends, if that is known."""
        if self.since is None or self.took is None:
            return self.arrived
        return self.since + self.took

    @property
    def answers(self) -> dict[int, Content | BadReply]:
        """The first answer of each client."""
        answers: dict[int, Content | BadReply] = {}
        for message in self.replies:
            with suppress(BadReply):
                came = contents(message, sender(message, self.asked))
                answers |= {c: came[c] for c in came if c in self.asked.clients} | answers
        return answers

    def usable_replies(self) -> Iterator[Reply]:
        """Yield the replies that can be used, as far as each by itself can tell.

        Faults are logged when the replies are used.
        """
        for client, content in self.answers.items():
            if (reply := reply_of(self.asked, client, content)) is not None:
                yield reply


@dataclass(frozen=True)
class Late:
    """A request without a reply: what it is part of, and the key of its phase."""

    request: Request
    asked: Asked
    key: int


@dataclass
class Phases:
    """The open phases by key, and the requests under way."""

    open: dict[int, Phase] = field(default_factory=dict)
    underway: dict[str, Late] = field(default_factory=dict)
    started: float = 0.0
    """When the run began by arrival."""
    wanted: int = 0
    """How many usable replies the round waits for, if it counts them."""
    until: float = math.inf
    """By arrival, when the round waits no longer."""
    asks: int = 0
    """How often the round has asked clients."""
    idle: bool = True
    """Whether the round may find an idle client to ask."""
    _watch: Watch | None = None

    @classmethod
    def after(cls, seconds: float) -> Phases:
        """Return the phases of a run that has lasted so long."""
        return cls(started=time.monotonic() - seconds)

    @property
    def busy(self) -> set[int]:
        """The clients that have not answered an earlier request."""
        return {client for late in self.underway.values() for client in late.request.clients}

    @property
    def at_work(self) -> set[int]:
        """The clients of the open phases, and those that have not answered an earlier request."""
        return self.busy.union(*(phase.asked.clients for phase in self.open.values()))

    def begin(self, wanted: int, seconds: float) -> None:
        """Begin a round that waits for so many usable replies, by arrival at most so long."""
        self.wanted, self.until = wanted, time.monotonic() + seconds
        self.asks, self.idle = 0, True

    @property
    def placeless(self) -> list[Phase]:
        """The phases that wait for a place, in the order in which they get one."""
        return [phase for phase in self.open.values() if phase.since is None]

    def working(self, ended: Collection[int]) -> int:
        """Return how many clients have begun, but for those of the phases that ``ended``."""
        begun = (p for key, p in self.open.items() if p.since is not None and key not in ended)
        return sum(len(phase.asked.clients) for phase in begun)

    @property
    def unfinished(self) -> dict[int, list[Any]]:
        """The open phases by round, as a checkpoint has them: since when each client, the model."""
        works: dict[int, list[Any]] = {}
        for phase in self.open.values():
            clients, _ = works.setdefault(phase.asked.round.number, [{}, phase.model.arrays])
            clients |= dict.fromkeys(phase.asked.clients, phase.since)
        return works

    def usable(self, keys: Iterable[int]) -> int:
        """Return how many replies of the ended phases of these keys can be used."""
        ended = [self.open[key] for key in keys]
        for phase in ended:
            if phase.usable is None:
                phase.usable = sum(1 for _ in phase.usable_replies())
        return sum(phase.usable or 0 for phase in ended)

    def close(self, keys: Iterable[int]) -> list[Phase]:
        """Close the phases of these keys and return them."""
        return [self.open.pop(key) for key in keys]

    def as_they_end(
        self, grid: Grid, timeout: float, lasts: Callable[[int, Phase], float] | None
    ) -> Iterator[int]:
        """Yield the keys of the open phases as they end, the first first; others may open then.

        ``lasts`` returns how many virtual seconds the phase of a key lasts, which has its replies;
        by arrival it is None.
        """
        over = set[int]()
        while left := self.open.keys() - over:
            if lasts is None:
                self._push(grid)
            else:
                self._work(grid, timeout, lasts)
            ends = {key: end for key in left if (end := self.open[key].end) is not None}
            if ends:
                key = min(ends, key=lambda key: (ends[key], key))
                over.add(key)
                yield key
            elif lasts is None and time.monotonic() < self.until:
                self._pull(grid)
            else:
                return

    # ---- by the virtual clock -----------------------------------------------------------------

    def _work(self, grid: Grid, timeout: float, lasts: Callable[[int, Phase], float]) -> None:
        """Have the clients of the new phases work."""
        new = {key: phase for key, phase in self.open.items() if phase.took is None}
        if not new:
            return
        every = (message for phase in new.values() for message in phase.asked.messages)
        messages = {id(message): message for message in every}  # several may have one to a host
        self._take_replies(new.values(), send_and_receive(grid, messages.values(), timeout))
        for key, phase in new.items():
            phase.took = lasts(key, phase)

    def _take_replies(self, phases: Iterable[Phase], replies: Iterable[Message]) -> None:
        """Hand each reply to those of the ``phases`` that asked for it."""
        new = [*phases]
        of_node: dict[int, list[Phase]] = {}
        for phase in new:
            for node in phase.asked.by_node:
                of_node.setdefault(node, []).append(phase)
        for reply in replies:
            theirs = of_node.get(reply.metadata.src_node_id, [])
            asked = [phase for phase in theirs or new if answers(reply, phase.asked)]
            for phase in asked or (theirs or new)[:1]:  # a stray reply goes to any
                phase.replies.append(reply)

    # ---- by arrival ---------------------------------------------------------------------------

    def _push(self, grid: Grid) -> None:
        """Send the messages of the phases that are new."""
        new = [
            (message, request, key, phase)
            for key, phase in self.open.items()
            if phase.end is None and not phase.waiting and not phase.replies
            for message, request in zip(phase.asked.messages, phase.asked.requests, strict=False)
        ]
        ids = self._watch_of(grid).push([message for message, *_ in new]) if new else []
        for message_id, (_, request, key, phase) in zip(ids, new, strict=True):
            if message_id:
                self.underway[message_id] = Late(request, phase.asked, key)
                phase.waiting.add(message_id)

    def _pull(self, grid: Grid, pause: float | None = None) -> None:
        """Take in the replies that have come, end the phases that are complete or out of time.

        Wait ``pause`` seconds, by default ``PAUSE``, if none has come.
        """
        replies, lost = self._watch_of(grid).pull(self.underway)
        for reply in replies:
            self._take_reply(reply)
        for message_id in lost:
            late = self.underway.pop(message_id)
            if late.key in self.open:
                self.open[late.key].waiting.discard(message_id)
        now = time.monotonic()
        underway = {late.key for late in self.underway.values()}
        for key, phase in self.open.items():
            # with no reply yet, one that is late from an earlier phase is waited for
            complete = not phase.waiting and (phase.replies or key not in underway)
            if phase.arrived is None and (complete or now >= phase.deadline):
                phase.arrived = now - self.started
        if not replies:
            time.sleep(PAUSE if pause is None else pause)

    def take_late(self, grid: Grid, timeout: float, clients: Collection[int]) -> None:
        """Take in late replies; wait for one, ``timeout`` seconds, while all are at work."""
        until, pause = time.monotonic() + timeout, 0.0
        while self.underway and time.monotonic() < until:
            self._pull(grid, pause)
            if not {*clients} <= self.busy:
                return
            pause = PAUSE

    def _watch_of(self, grid: Grid) -> Watch:
        if self._watch is None or self._watch.grid is not grid:
            self._watch = Watch(grid)
        return self._watch

    def _take_reply(self, reply: Message) -> None:
        about = reply.metadata
        by_node = (k for k, late in self.underway.items() if late.request.node == about.src_node_id)
        # Flower's replies name the message, its own error replies, which come from no node, too
        late = self.underway.pop(about.reply_to_message_id or next(by_node, ""), None)
        if late is None or late.key not in self.open:
            return
        phase, request = self.open[late.key], late.request
        phase.waiting &= self.underway.keys()
        phase.replies.append(reply)
        if request not in phase.asked.requests:
            phase.asked = _with_late(phase.asked, late)


def works_of(
    asked: Asked, model: Model, since: float | None = 0.0, *, alone: bool = False
) -> dict[int, Phase]:
    """Return the phases of what was asked, by their first client: one of each message.

    ``alone``: one of each client.
    """
    works: dict[int, Phase] = {}
    for message, request in zip(asked.messages, asked.requests, strict=True):
        everyone = frozenset(request.clients)
        for clients in [(c,) for c in request.clients] if alone else [request.clients]:
            own = replace(
                asked,
                round=replace(asked.round, asked=clients),
                messages=[message],
                requests=[replace(request, clients=clients, together=everyone)],
                bytes_down=asked.bytes_down * len(clients) // len(asked.clients),
            )
            works[clients[0]] = Phase(own, model, since)
    return works


def as_one_phase(phases: Sequence[Phase], nobody: Asked) -> tuple[Asked, list[Message]]:
    """Return what was asked in ``phases``, as one phase, and the replies.

    ``nobody`` is the phase without them: the round and when it began. Its clients may be at work
    since earlier rounds.
    """
    clients = tuple(client for phase in phases for client in phase.asked.clients)
    asked = replace(
        nobody,
        round=replace(nobody.round, asked=clients),
        by_client={c: phase.asked.of(c) for phase in phases for c in phase.asked.clients},
        requests=[request for phase in phases for request in phase.asked.requests],
        bytes_down=sum(phase.asked.bytes_down for phase in phases),
        told={
            key: {client for phase in phases for client in phase.asked.told[key]}
            for key in nobody.told
        },
    )
    replies = {id(reply): reply for phase in phases for reply in phase.replies}
    return asked, [*replies.values()]


def answers(reply: Message, asked: Asked) -> bool:
    """Return whether ``reply`` answers one of the requests ``asked``, or says that it cannot."""
    try:
        sender(reply, asked)
    except BadReply:
        return lost_request(reply, asked) is not None
    return True


def _with_late(asked: Asked, late: Late) -> Asked:
    """Return ``asked`` with a request of an earlier phase."""
    clients = tuple(dict.fromkeys([*asked.clients, *late.request.clients]))
    return replace(
        asked,
        round=replace(asked.round, asked=clients),
        by_client={**asked.by_client, **dict.fromkeys(late.request.clients, late.asked)},
        requests=[*asked.requests, late.request],
    )
