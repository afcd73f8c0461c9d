"""The phases of several cloud servers at a time: what is asked, what came back, who is done.

A cloud server's phase opens when its devices are asked, and closes when it mixes. Phases end by the
virtual clock or by arrival; in both cases the strategy decides which of the ended ones close.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fl_strategies.core.records import BadReply, Round
from fl_strategies.server.replies import content_as, contents, lost_request, sender

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

    from fl_strategies.core.layout import Arrays
    from fl_strategies.messages.wire import Content
    from fl_strategies.server.asked import Asked, Request

PAUSE = 0.5
"""Seconds between two looks for replies, while none come."""


@dataclass
class Phase:
    """A cloud server's devices at work: who was asked, what came back, and when it was done."""

    asked: Asked
    """With late ones of earlier phases once they answer in this one."""
    deadline: float
    buffers: Arrays
    """What its devices were sent in addition to the cloud server's model."""
    waiting: set[str] = field(default_factory=set)
    """Ids of this phase's messages without a reply."""
    replies: list[Message] = field(default_factory=list)
    end: float | None = None

    @property
    def unfinished(self) -> list[Any]:
        """The round in which its devices were asked, these devices, and the buffers."""
        return [self.asked.round.number, list(self.asked.clients), self.buffers]


@dataclass(frozen=True)
class Late:
    """A request without a reply: its round and its cloud server."""

    request: Request
    server_round: int
    cloud: int


@dataclass
class Phases:
    """The open phases by cloud server, and the requests under way."""

    open: dict[int, Phase] = field(default_factory=dict)
    underway: dict[str, Late] = field(default_factory=dict)
    started: float = 0.0
    """When the run began by arrival, so that ``end`` counts seconds from there."""

    @property
    def busy(self) -> set[int]:
        """The clients that have not answered an earlier request."""
        return {client for late in self.underway.values() for client in late.request.clients}

    @property
    def ends(self) -> dict[int, float]:
        """When each cloud server was done, of those that are."""
        return {n: phase.end for n, phase in self.open.items() if phase.end is not None}

    def close(self, clouds: Iterable[int]) -> list[Phase]:
        """Close the phases of ``clouds`` and return them."""
        return [self.open.pop(n) for n in clouds]

    # ---- by the virtual clock -----------------------------------------------------------------

    def take_replies(
        self,
        replies: Iterable[Message],
        read: Callable[[Asked, int, Content], Mapping[str, Any]],
        end: Callable[[int, Round, Mapping[int, float]], float],
    ) -> None:
        """Hand each reply to the phase in which its node was asked, and end the new phases.

        ``read`` returns a reply's numbers, ``end`` when a cloud server is done whose devices did
        that work.
        """
        new = {n: phase for n, phase in self.open.items() if phase.end is None}
        for reply in replies:
            node = reply.metadata.src_node_id
            asked = [phase for phase in new.values() if is_reply_to(reply, phase.asked)]
            asked = asked or [phase for phase in new.values() if node in phase.asked.by_node]
            for phase in (asked or list(new.values()))[:1]:  # a stray reply goes to any
                phase.replies.append(reply)
        for n, phase in new.items():
            phase.end = end(n, phase.asked.round, _work(phase, read))

    # ---- by arrival ---------------------------------------------------------------------------

    def push(self, grid: Grid) -> None:
        """Send the messages of the phases that are new."""
        new = [
            (message, request, n, phase)
            for n, phase in self.open.items()
            if phase.end is None and not phase.waiting and not phase.replies
            for message, request in zip(phase.asked.messages, phase.asked.requests, strict=False)
        ]
        ids = grid.push_messages([message for message, *_ in new])
        # a request that Flower could not send has the id None, and all of them may have no id
        for message_id, (_, request, n, phase) in zip(ids, new, strict=False):
            if message_id:
                self.underway[message_id] = Late(request, phase.asked.round.number, n)
                phase.waiting.add(message_id)

    def pull(self, grid: Grid) -> None:
        """Take in the replies that have come, end the phases that are complete or out of time."""
        replies = list(grid.pull_messages(list(self.underway)))
        for reply in replies:
            self._take_reply(reply)
        now = time.monotonic()
        underway = {late.cloud for late in self.underway.values()}
        for n, phase in self.open.items():
            # with no reply yet, one that is late from an earlier phase is waited for
            complete = not phase.waiting and (phase.replies or n not in underway)
            if phase.end is None and (complete or now >= phase.deadline):
                phase.end = now - self.started
        if not replies:
            time.sleep(PAUSE)

    def _take_reply(self, reply: Message) -> None:
        about = reply.metadata
        by_node = (k for k, late in self.underway.items() if late.request.node == about.src_node_id)
        # Flower's replies name the message, its own error replies, which come from no node, too
        late = self.underway.pop(about.reply_to_message_id or next(by_node, ""), None)
        if late is None or late.cloud not in self.open:
            return
        phase, request = self.open[late.cloud], late.request
        phase.waiting &= self.underway.keys()
        phase.replies.append(reply)
        if request not in phase.asked.requests:
            phase.asked = _with_late(phase.asked, late)


def as_one_phase(phases: Sequence[Phase], nobody: Asked) -> tuple[Asked, list[Message]]:
    """Return what was asked in ``phases``, as one phase, and the replies.

    ``nobody`` is the phase without them.
    """
    clients = tuple(client for phase in phases for client in phase.asked.clients)
    asked = replace(
        nobody,
        round=replace(nobody.round, asked=clients),
        rounds={
            client: number
            for phase in phases
            for client in phase.asked.clients
            for number in [phase.asked.rounds.get(client, phase.asked.round.number)]
        },
        requests=[request for phase in phases for request in phase.asked.requests],
        bytes_down=sum(phase.asked.bytes_down for phase in phases),
        started=min([nobody.started, *(phase.asked.started for phase in phases)]),
    )
    return asked, [reply for phase in phases for reply in phase.replies]


def is_reply_to(reply: Message, asked: Asked) -> bool:
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
        rounds={**asked.rounds, **dict.fromkeys(late.request.clients, late.server_round)},
        requests=[*asked.requests, late.request],
    )


def _work(
    phase: Phase, read: Callable[[Asked, int, Content], Mapping[str, Any]]
) -> dict[int, float]:
    """Return the K that each client's first reply reports, where that can be read."""
    numbers, work = partial(read, phase.asked), dict[int, float]()
    for client, content in _first_contents(phase):
        if client in phase.asked.clients and client not in work:
            work[client] = 1.0
            with suppress(BadReply):
                work[client] = float(content_as(client, content, numbers)["work"])
    return work


def _first_contents(phase: Phase) -> Iterator[tuple[int, Any]]:
    for reply in phase.replies:
        with suppress(BadReply):  # which is logged when the phase is used
            yield from contents(reply, sender(reply, phase.asked)).items()
