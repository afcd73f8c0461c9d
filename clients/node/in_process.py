"""An engine without Ray or network: a Flower Grid that calls the ClientApp in this process.

``Strategy.start`` and ClientApps run on it unchanged, and results are repeatable to the bit.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from logging import WARNING
from typing import IO

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.node.host import HostContext, TravellingContext, members_of
from clients.node.packing import app_of
from clients.node.workers import Workers
from fl_strategies.core.hyperparameters import Scalar
from fl_strategies.core.log import log
from fl_strategies.core.reasons import of_exception
from fl_strategies.core.schedules import check
from fl_strategies.messages.hosting import asked_in, is_hosted
from fl_strategies.messages.internals import (
    RecordDictProto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from fl_strategies.messages.one_process import OneProcessGrid, delivered, error_reply, node_ids

STATE_MEMORY = 10**9
"""Bytes of clients' states that are kept in memory."""
Fault = Callable[[Message, Message], Message | None]
"""``fault(request, reply)`` returns the reply that arrives instead, or None if none arrives."""


class InProcessGrid(OneProcessGrid):
    """A federation of ``num_clients`` nodes, each with its own ``context.state``.

    Parameters
    ----------
    client_app : ClientApp, or str
        ``"module:name"`` names one that is imported.
    num_clients : int >= 1
    hosts : int >= 0 (default 0)
        The number of nodes, if the app makes them hosts (``client_app(..., hosts=...)``); with 0
        each client is a node. The node config of ``node_ids(...)[i]`` has ``partition-id`` i and
        ``num-partitions``, the number of nodes. As in Flower, node ids are random 64-bit numbers,
        half of them above 2^63; unlike in Flower, they are the same in every run.
    run_config : dict, optional
        The apps' ``context.run_config``.
    fault : callable, optional
        Called with each request and reply after the client's work; returns the reply that arrives.
    workers : int >= 1 (default 1)
        Processes that train and evaluate; with 1 it is this one. Results are the same to the bit if
        a client computes on one thread of torch, as each worker does. Workers hold copies of the
        app, sent by ``cloudpickle`` (of ``pip install '.[simulation]'``) or imported by name; a
        worker that dies costs the reply that it was working on: a client's, or a host's. As many
        hosts as workers cost the fewest messages.
    state_memory : int >= 0 (default 10^9)
        Bytes of arrays in clients' ``context.state`` that are kept in memory. Further states go
        to a temporary file, and are empty in ``contexts`` while their clients do not work. The file
        has no name: the system removes it however the process ends.
    """

    def __init__(
        self,
        client_app: ClientApp | str,
        num_clients: int,
        *,
        hosts: int = 0,
        workers: int = 1,
        run_config: dict[str, Scalar] | None = None,
        fault: Fault | None = None,
        state_memory: int = STATE_MEMORY,
    ) -> None:
        check("num_clients", num_clients, low=1, integer=True)
        check("hosts", hosts, low=0, integer=True)
        check("workers", workers, low=1, integer=True)
        check("state_memory", state_memory, low=0)
        super().__init__()
        self.client_app, self.fault = app_of(client_app), fault
        self._workers = Workers(client_app, workers) if workers > 1 else None
        self._states = _States(state_memory, num_clients)
        self._num_clients, self._run_config = num_clients, dict(run_config or {})
        self.clients: dict[int, Context] = {}
        """By id, the contexts of hosted clients that were asked."""
        nodes = hosts or num_clients
        self.contexts = {
            node: self._context(HostContext if hosts else Context, node, i, nodes)
            for i, node in enumerate(node_ids(nodes))
        }

    def _context(self, kind: type[Context], node: int, place: int, of: int) -> Context:
        """Return the context of node, or client, number ``place`` of ``of``."""
        context = kind(
            run_id=1,
            node_id=node,
            node_config={"partition-id": place, "num-partitions": of},
            state=RecordDict(),
            run_config=dict(self._run_config),
        )
        if isinstance(context, HostContext):
            context.fetch, context.keep = self._fetch, self._states.keep
        return context

    def _fetch(self, client: int) -> Context:
        """Return the context of a hosted client, which its first request makes."""
        if client not in self.clients:
            self.clients[client] = self._context(Context, client, client, self._num_clients)
        self._states.fetch(self.clients[client])
        return self.clients[client]

    def client_contexts(self) -> Iterator[Context]:
        """Yield each client's context, with its state; of hosted ones, those that were asked."""
        for context in [*self.contexts.values(), *self.clients.values()]:
            if isinstance(context, HostContext):
                continue
            self._states.fetch(context)
            yield context
            self._states.keep(context)

    def answers(self, messages: Iterable[Message]) -> Iterable[tuple[Message, Message | None]]:
        """Yield each message and its reply."""
        return self._by_workers([*messages]) if self._workers else super().answers(messages)

    def answer(self, message: Message) -> Message | None:
        """Return the reply of the message's node, or ``None`` if none arrives."""
        if message.metadata.dst_node_id not in self.contexts:
            return None
        context = self._awake(message)
        try:
            reply = self.client_app(delivered(message), context)
        except Exception as error:
            reply = error_reply(message, of_exception(error))
        finally:
            self._states.keep(context)
        return self._arrived(message, reply)

    def _by_workers(self, messages: list[Message]) -> Iterator[tuple[Message, Message | None]]:
        """Yield each message and its reply; introductions are answered in this process."""
        assert self._workers is not None
        works = [message for message in messages if message.metadata.message_type != "query"]
        works = [message for message in works if message.metadata.dst_node_id in self.contexts]
        replies: dict[int, Message] = {}
        for request, reply, context in self._workers.replies_to(works, self._travelling):
            for client in members_of(context):
                self._states.keep(client)
            replies[id(request)] = reply
        for message in messages:
            if id(message) in replies:
                yield message, self._arrived(message, replies.pop(id(message)))
            else:
                yield message, self.answer(message)

    def _awake(self, message: Message) -> Context:
        """Return the context of the message's node, with its state."""
        context = self.contexts[message.metadata.dst_node_id]
        self._states.fetch(context)
        return context

    def _travelling(self, message: Message) -> Context:
        """Return what a worker gets: a host's context goes with those of the clients asked."""
        context = self._awake(message)
        if not isinstance(context, HostContext):
            return context
        asked = asked_in(message.content) if is_hosted(message.content) else []
        return TravellingContext(context, {client: self._fetch(client) for client in asked})

    def _arrived(self, message: Message, reply: Message) -> Message | None:
        return reply if self.fault is None else self.fault(message, reply)


class _States:
    """The states of clients that do not work: in memory up to ``limit`` bytes, else in a file."""

    def __init__(self, limit: int, clients: int) -> None:
        self.limit, self.clients, self.in_memory = limit, clients, 0
        self._kept: dict[int, int] = {}
        self._file: IO[bytes] | None = None
        self._stored: dict[int, int] = {}
        self._blocks: dict[int, tuple[int, int]] = {}  # size and offset in the file
        self._outgrown: list[tuple[int, int]] = []  # blocks that no client has any more, sorted
        self._end = 0

    def fetch(self, context: Context) -> None:
        """Give the client its state back, before it works."""
        self.in_memory -= self._kept.pop(context.node_id, 0)
        length = self._stored.pop(context.node_id, None)
        if length is not None:
            assert self._file is not None
            self._file.seek(self._blocks[context.node_id][1])
            message = RecordDictProto.FromString(self._file.read(length))
            context.state = recorddict_from_proto(message)

    def keep(self, context: Context) -> None:
        """Keep the client's state, in memory or in the file, after the client worked."""
        size = _bytes(context.state)
        if self.in_memory + size <= self.limit:
            self._kept[context.node_id] = size
            self.in_memory += size
        else:
            self._store(context)

    def _store(self, context: Context) -> None:
        folder = tempfile.gettempdir()
        data = recorddict_to_proto(context.state).SerializeToString()
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
            log(
                WARNING,
                "clients' states are larger than %g MB (state-memory): those beyond go to a"
                " temporary file in %s, of up to %.3g GB (%d clients, %.3g MB, twice while the"
                " server has not acknowledged it); %.3g GB are free there",
                self.limit / 1e6,
                folder,
                2 * self.clients * len(data) / 1e9,
                self.clients,
                len(data) / 1e6,
                shutil.disk_usage(folder).free / 1e9,
            )
        try:
            self._file.seek(self._block(context.node_id, len(data)))
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise OSError(
                f"clients' states do not fit into {folder} (TMPDIR names another directory,"
                f" state-dir one that stays, state-memory keeps more in memory): {error}"
            ) from error
        self._stored[context.node_id] = len(data)
        context.state = RecordDict()

    def _block(self, node: int, size: int) -> int:
        """Return the offset of the node's block, or of a new one if ``size`` bytes outgrow it."""
        block = self._blocks.get(node)
        if block is None or size > block[0]:
            if block is not None:
                insort(self._outgrown, block)
            place = bisect_left(self._outgrown, (size, 0))
            if place < len(self._outgrown):
                block = self._outgrown.pop(place)
            else:
                block, self._end = (size, self._end), self._end + size
            self._blocks[node] = block
        return block[1]


def _bytes(state: RecordDict) -> int:
    records = (record for record in state.values() if isinstance(record, ArrayRecord))
    return sum(len(array.data) for record in records for array in record.values())
