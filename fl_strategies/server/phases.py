"""The phases that are open at a time: what is asked, what came back, and when it was done.

A phase opens when its clients are asked, and closes when their replies are used. It ends by a
virtual clock or by arrival; who opened it decides which of the ended ones close. FedBCD's cloud
servers have a phase each, a pace (:mod:`.pacing`) one for each client at work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import TYPE_CHECKING, Any

from fl_strategies.core.log import log
from fl_strategies.core.records import BadReply
from fl_strategies.messages.internals import ObjectPushError
from fl_strategies.server.replies import contents, lost_request, sender

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

    from fl_strategies.server.asked import Asked, Request
    from fl_strategies.server.model import Model

PAUSE = 0.5
"""Seconds between two looks for replies, while none come."""


@dataclass
class Phase:
    """Clients at work: who was asked, what came back, and when it was done."""

    asked: Asked
    """With late ones of earlier phases once they answer in this one."""
    model: Model
    """What the clients train, before any rounding."""
    deadline: float
    waiting: set[str] = field(default_factory=set)
    """Ids of this phase's messages without a reply."""
    replies: list[Message] = field(default_factory=list)
    end: float | None = None

    def contents(self) -> Iterator[tuple[int, Any]]:
        """Yield what the first reply of each client has; faults are logged when it is used."""
        answered = set[int]()
        for reply in self.replies:
            with suppress(BadReply):
                for client, content in contents(reply, sender(reply, self.asked)).items():
                    if client in self.asked.clients and client not in answered:
                        answered.add(client)
                        yield client, content


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
    """When the run began by arrival, so that ``end`` counts seconds from there."""

    @property
    def busy(self) -> set[int]:
        """The clients that have not answered an earlier request."""
        return {client for late in self.underway.values() for client in late.request.clients}

    @property
    def at_work(self) -> set[int]:
        """The clients of the open phases, and those that have not answered an earlier request."""
        return self.busy.union(*(phase.asked.clients for phase in self.open.values()))

    @property
    def ends(self) -> dict[int, float]:
        """When each phase ended, of those that did."""
        return {key: phase.end for key, phase in self.open.items() if phase.end is not None}

    @property
    def new(self) -> dict[int, Phase]:
        """The phases that have not ended."""
        return {key: phase for key, phase in self.open.items() if phase.end is None}

    def close(self, keys: Iterable[int]) -> list[Phase]:
        """Close the phases of these keys and return them."""
        return [self.open.pop(key) for key in keys]

    # ---- by the virtual clock -----------------------------------------------------------------

    def send_and_receive(
        self, grid: Grid, timeout: float, end: Callable[[int, Phase], float]
    ) -> None:
        """Have the clients of the new phases work, and end these phases.

        ``end`` returns when the phase of a key is done, which has its replies.
        """
        new = self.new
        self._take_replies(grid.send_and_receive(messages_of([*new.values()]), timeout=timeout))
        for key, phase in new.items():
            phase.end = end(key, phase)

    def _take_replies(self, replies: Iterable[Message]) -> None:
        """Hand each reply to the phases that asked for it."""
        new = [*self.new.values()]
        of_node: dict[int, list[Phase]] = {}
        for phase in new:
            for node in phase.asked.by_node:
                of_node.setdefault(node, []).append(phase)
        for reply in replies:
            theirs = of_node.get(reply.metadata.src_node_id, [])
            asked = [phase for phase in theirs or new if is_reply_to(reply, phase.asked)]
            for phase in asked or (theirs or new)[:1]:  # a stray reply goes to any
                phase.replies.append(reply)

    # ---- by arrival ---------------------------------------------------------------------------

    def push(self, grid: Grid) -> None:
        """Send the messages of the phases that are new."""
        new = [
            (message, request, key, phase)
            for key, phase in self.new.items()
            if not phase.waiting and not phase.replies
            for message, request in zip(phase.asked.messages, phase.asked.requests, strict=False)
        ]
        try:
            ids = grid.push_messages([message for message, *_ in new])
        except ObjectPushError as error:  # on a busy machine Flower may not know what it stored
            log(WARNING, "requests were not sent: %s", error)
            ids = []
        # a request that Flower could not send has the id None, and all of them may have no id
        for message_id, (_, request, key, phase) in zip(ids, new, strict=False):
            if message_id:
                self.underway[message_id] = Late(request, phase.asked, key)
                phase.waiting.add(message_id)

    def pull(self, grid: Grid, pause: float | None = None) -> None:
        """Take in the replies that have come, end the phases that are complete or out of time.

        Wait ``pause`` seconds, by default ``PAUSE``, if none has come.
        """
        replies = list(grid.pull_messages(list(self.underway)))
        for reply in replies:
            self._take_reply(reply)
        now = time.monotonic()
        underway = {late.key for late in self.underway.values()}
        for key, phase in self.open.items():
            # with no reply yet, one that is late from an earlier phase is waited for
            complete = not phase.waiting and (phase.replies or key not in underway)
            if phase.end is None and (complete or now >= phase.deadline):
                phase.end = now - self.started
        if not replies:
            time.sleep(PAUSE if pause is None else pause)

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


def messages_of(phases: Iterable[Phase]) -> list[Message]:
    """Return the messages of ``phases``; several may have one to a host in common."""
    every = (message for phase in phases for message in phase.asked.messages)
    return [*{id(message): message for message in every}.values()]


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
    )
    replies = {id(reply): reply for phase in phases for reply in phase.replies}
    return asked, [*replies.values()]


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
        by_client={**asked.by_client, **dict.fromkeys(late.request.clients, late.asked)},
        requests=[*asked.requests, late.request],
    )
