"""Waiting for replies: until all are there, the time is over, or no other can come.

Requests to a SuperNode are lost with it. Flower up to 1.42 answers for a node that is offline. Its
1.43 does not, and no version does for a node that came back before it answered, whose new process
knows nothing of the request. So the nodes of a deployment are looked at while replies are awaited.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import WARNING, LogRecord
from typing import TYPE_CHECKING

from fl_strategies.core.log import FLOWER, flowers_errors_as_debug, log
from fl_strategies.messages.internals import REPLY_LOST, ObjectPushError

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

PAUSE = 0.5
"""Seconds between two looks for replies, while none come."""
LOOK = 3.0
"""Seconds between two looks for the nodes."""


@dataclass
class Watch:
    """Tells which requests to the nodes of ``grid`` cannot be answered any more."""

    grid: Grid
    _since: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By message, its node, and since when the node was online when the message was sent."""
    _unreadable: set[str] = field(default_factory=set)
    """Ids of replies of which Flower's log says that their content is lost."""
    _looked: float = 0.0

    def push(self, messages: Iterable[Message]) -> list[str]:
        """Send the messages; return their ids, "" for one that Flower could not send."""
        messages, online = list(messages), _online(self.grid)
        try:
            ids = [message_id or "" for message_id in self.grid.push_messages(messages)]
        except ObjectPushError as error:  # on a busy machine Flower may not know what it stored
            log(WARNING, "requests were not sent: %s", error)
            ids = []
        ids += [""] * (len(messages) - len(ids))
        for message_id, message in zip(ids, messages, strict=True):
            node = message.metadata.dst_node_id
            if message_id and node in online:
                self._since[message_id] = node, online[node]
        return ids

    def pull(self, ids: Iterable[str]) -> tuple[list[Message], set[str]]:
        """Return the replies to ``ids`` that have come, and which of the others cannot come.

        These are the requests to nodes that were offline since, and all of them if as many replies
        were lost on their way as are waited for: Flower does not say which.
        """
        asked, now = list(ids), time.monotonic()
        online: Mapping[int, str] | None = None
        if now - self._looked >= LOOK and not self._since.keys().isdisjoint(asked):
            self._looked, online = now, _online(self.grid)  # before replies: those sent are there
        with self._noted():
            replies = list(self.grid.pull_messages(asked))
        left = {*asked} - {reply.metadata.reply_to_message_id for reply in replies}
        lost = set[str]()
        if online is not None:
            known = {name: self._since[name] for name in left & self._since.keys()}
            lost = {name for name, (node, since) in known.items() if online.get(node) != since}
            for _ in [*self._unreadable][: len(lost)]:
                self._unreadable.pop()  # it may have been the reply of a lost node
        if len(left - lost) <= len(self._unreadable):
            self._unreadable, lost = set(), left
        for name in {*asked} - (left - lost):
            self._since.pop(name, None)
        return replies, lost

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note the replies of which Flower's log says that they cannot be read."""

        def note(record: LogRecord) -> bool:
            if record.msg == REPLY_LOST and isinstance(record.args, tuple):
                self._unreadable.add(str(record.args[0]))
            return True

        FLOWER.addFilter(note)
        try:
            yield
        finally:
            FLOWER.removeFilter(note)


def send_and_receive(
    grid: Grid, messages: Iterable[Message], timeout: float | None
) -> list[Message]:
    """Send ``messages`` and return the replies that come within ``timeout`` seconds.

    It returns earlier if no other reply can come.
    """
    if not _may_lose_nodes(grid):
        return list(grid.send_and_receive(messages, timeout=timeout))
    return _watched(grid, messages, timeout)


def ask(grid: Grid, queries: Iterable[Message], timeout: float) -> list[Message]:
    """Return the replies to queries, which an app may not answer.

    The ``timeout`` begins anew with each reply: once a first client is up, so are others soon, and
    a slow machine must not train without them.
    """
    with flowers_errors_as_debug():
        if hasattr(grid, "pull_interval") or _may_lose_nodes(grid):  # Ray's, or a deployment's
            return _watched(grid, queries, timeout, anew=True)
        return list(grid.send_and_receive(queries, timeout=timeout))


def _watched(
    grid: Grid, messages: Iterable[Message], timeout: float | None, *, anew: bool = False
) -> list[Message]:
    """Return the replies; with ``anew`` the timeout begins anew with each."""
    begun, watch = time.monotonic(), Watch(grid)
    replies: list[Message] = []
    waiting = {name for name in watch.push(messages) if name}
    while waiting and (timeout is None or time.monotonic() - begun < timeout):
        new, lost = watch.pull(waiting)
        replies += new
        waiting -= lost.union(reply.metadata.reply_to_message_id for reply in new)
        if waiting and not new:
            time.sleep(PAUSE)
        if new and anew:
            begun = time.monotonic()
    return replies


def _may_lose_nodes(grid: Grid) -> bool:
    """Return whether the nodes are SuperNodes, and not part of this run."""
    return hasattr(grid, "get_nodes") and not (
        hasattr(grid, "pull_interval") or getattr(grid, "closed", False)
    )


def _online(grid: Grid) -> Mapping[int, str]:
    """Return since when each node of a deployment is online; nothing of other grids."""
    if not _may_lose_nodes(grid):
        return {}
    return {node.node_id: node.last_activated_at for node in grid.get_nodes()}
