"""An engine without Ray or network: a Flower Grid that calls the ClientApp in this process.

``Strategy.start`` and ClientApps run on it unchanged, repeatable to the bit.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from logging import ERROR
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from simulations.config import Scalar

FIRST_NODE = 1001
CLIENT_APP_RAISED = 2
"""Flower's error code for an exception in the ClientApp."""

Fault = Callable[[Message, Message], Message | None]
"""``fault(request, reply)`` returns the reply that arrives in its stead, or None if none does."""


class InProcessGrid(Grid):
    """A federation of ``num_clients`` nodes, each with its own ``context.state``.

    Parameters
    ----------
    client_app : ClientApp
    num_clients : int >= 1
        Node ``1001 + i`` has ``partition-id`` i and ``num-partitions`` as its node config.
    run_config : dict, optional
        What the apps find in ``context.run_config``.
    fault : callable, optional
        Decides what becomes of each reply, after the client has done its work.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        *,
        run_config: dict[str, Scalar] | None = None,
        fault: Fault | None = None,
    ) -> None:
        if num_clients < 1:
            raise ValueError(f"num_clients must be >= 1, got {num_clients}")
        become_server()
        self.client_app, self.fault = client_app, fault
        self._run: Any = None
        self._replies: dict[str, Message] = {}
        self._message_ids = itertools.count(1)
        self.contexts = {
            FIRST_NODE + i: Context(
                run_id=1,
                node_id=FIRST_NODE + i,
                node_config={"partition-id": i, "num-partitions": num_clients},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i in range(num_clients)
        }

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
        """Have each message answered at once; return the ids to pull the replies by."""
        ids = []
        for message in messages:
            message_id = str(next(self._message_ids))
            ids.append(message_id)
            reply = self._answer(message)
            if reply is not None:
                self._replies[message_id] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages that arrived and were not pulled before."""
        return [self._replies.pop(key) for key in message_ids if key in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies to ``messages``; nothing is waited for."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message | None:
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            return None
        try:
            reply = self.client_app(_received(message), context)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log(ERROR, "client of node %d raised %s", context.node_id, reason)
            reply = Message(Error(CLIENT_APP_RAISED, reason), reply_to=message)
        return reply if self.fault is None else self.fault(message, reply)


def _received(message: Message) -> Message:
    """Return ``message`` with records of its own, as it comes over a wire: mods write into them."""
    received = copy.copy(message)
    received.content = RecordDict()
    for key, record in message.content.items():
        received.content[key] = type(record)(dict(record))  # type: ignore[arg-type]
    return received


def become_server() -> None:
    """Let this process make messages as a ServerApp does (Flower's runtime sets this otherwise)."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
