"""A Flower Grid whose nodes are contexts in this process: what all such grids have in common."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from fl_strategies.core.randomness import stream
from fl_strategies.messages.encoding import copied
from fl_strategies.messages.internals import ErrorCode, TaskIdentity


def node_ids(count: int) -> list[int]:
    """Return the ids of the first ``count`` nodes; a larger ``count`` begins with the same ids."""
    ids = stream(0, "node-ids").integers(2, 2**64, size=count, dtype=np.uint64)
    return [int(node) for node in ids]


def become_server() -> None:
    """Let this process make messages as a ServerApp does; elsewhere Flower's runtime sets this."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def delivered(message: Message) -> Message:
    """Return a copy of ``message``, as a network would deliver it: mods write into its records."""
    received = copy.copy(message)
    received.content = message.content.copy()
    for key, record in message.content.items():
        received.content[key] = copied(record) if isinstance(record, ArrayRecord) else record.copy()
    return received


def error_reply(request: Message, reason: str) -> Message:
    """Return Flower's error for an exception in the ClientApp, in place of a reply."""
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=request)


class OneProcessGrid(Grid):
    """A federation of the nodes whose ``contexts`` it has, by node id; it says how they answer."""

    closed = True
    """No other node can join: who waits for more would wait for ever."""
    contexts: dict[int, Context]

    def __init__(self) -> None:
        become_server()
        self._run: Any = None
        self._replies: dict[str, Message] = {}
        self._message_ids = itertools.count(1)

    def answer(self, message: Message) -> Message | None:
        """Return the reply of the message's node, or ``None`` if none arrives."""
        raise NotImplementedError

    def answers(self, messages: Iterable[Message]) -> Iterable[tuple[Message, Message | None]]:
        """Yield each message and its reply: here one after the other."""
        return ((message, self.answer(message)) for message in messages)

    def set_run(self, run: Any) -> None:
        """Set the run that this grid serves."""
        self._run = run

    @property
    def run(self) -> Any:
        """The run that was set, if any."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new request (Flower's deprecated way of making one)."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have each message answered at once; return the ids by which to pull the replies."""
        ids = []
        for message, reply in self.answers(self._numbered(messages)):
            ids.append(message.metadata.message_id)
            if reply is not None:
                self._replies[ids[-1]] = reply
        return ids

    def _numbered(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Give each message its id, as Flower's grids do."""
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(next(self._message_ids))
            yield message

    def pull_messages(  # type: ignore[override]  # as of Flower 1.43, which takes 1.42's calls too
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        """Return the replies to these messages, by default to all, that were not pulled before.

        ``message_ids`` is Flower's older name of the argument.
        """
        if message_ids is not None and reply_to_message_ids is not None:
            raise TypeError("pull_messages takes reply_to_message_ids or message_ids, got both")
        ids = message_ids if reply_to_message_ids is None else reply_to_message_ids
        wanted = list(self._replies if ids is None else ids)
        return [self._replies.pop(key) for key in wanted if key in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies to ``messages``; they arrive at once."""
        return self.pull_messages(self.push_messages(messages))
