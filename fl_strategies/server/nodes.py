"""Which clients are connected, through which nodes.

Flower's node ids are random and change when a node restarts, so each node is asked once for the
stable id of its client. A client is the node that said so first, as long as this one is connected:
one that comes later with the same id (restarted under a new node id, or hostile) waits until then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from logging import ERROR, INFO, WARNING
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fl_strategies.core.reasons import named, root_cause
from fl_strategies.server.replies import answers, one_line

ATTEMPTS = 2
"""Failed queries after which a node's own id serves as its client's."""
NO_QUERY = "No query function registered"
"""How Flower says that an app has none, which does not pass."""


class Nodes:
    """The directory of nodes and clients.

    Parameters
    ----------
    patience : float > 0, seconds
        How long a query may take, how long a node that did not answer one is left alone, and how
        long the first round waits for nodes that the connected ones say exist.

    Attributes
    ----------
    known : set of int
        Ids of all clients ever connected.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.known: set[int] = set()
        self._client_of: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._failures: dict[int, int] = {}
        self._ask_again: dict[int, float] = {}
        self._expected = 0
        self._met = False

    def wait(self, grid: Grid, needed: int) -> dict[int, int]:
        """Return node by client id once ``needed`` clients are connected; the log says who waits.

        The first call also waits, up to ``patience``, until as many are connected as the nodes'
        ``num-partitions`` says.
        """
        started, said = time.monotonic(), 0.0
        while True:
            nodes = self.connected(grid)
            waited = time.monotonic() - started
            more = not self._met and len(nodes) < self._expected and waited < self.patience
            if len(nodes) >= needed and not more:
                self._met = True
                return nodes
            if waited - said >= 10:
                said = waited
                wanted = max(needed, self._expected if more else 0)
                log(WARNING, "%d clients connected, waiting for %d", len(nodes), wanted)
            time.sleep(min(0.05 + waited / 10, 1.0))

    def connected(self, grid: Grid) -> dict[int, int]:
        """Return node by client id for all clients that are connected, asking new nodes first."""
        online = set(grid.get_node_ids())
        self._client_of = {node: c for node, c in self._client_of.items() if node in online}
        for node, client in list(self._waiting.items()):
            if node not in online:
                del self._waiting[node]
            elif self._node_of(client) is None:
                self._take(self._waiting.pop(node), node)
        now = time.monotonic()
        new = [
            node
            for node in sorted(online - self._client_of.keys() - self._waiting.keys())
            if self._ask_again.get(node, now) <= now
        ]
        if new:
            queries = [
                Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY)
                for node in new
            ]
            self._ask_again |= dict.fromkeys(new, now + 2 * self.patience)
            asked = {query.metadata.dst_node_id: query.metadata for query in queries}
            nameless: dict[str, list[int]] = {}
            for reply in grid.send_and_receive(queries, timeout=self.patience):
                node = reply.metadata.src_node_id
                if node not in asked or not answers(reply, asked[node]):
                    continue
                del asked[node]
                if reply.has_content():
                    self._introduce(node, reply.content.config_records.get("client", {}))
                else:
                    reason = root_cause(reply.error.reason) if reply.has_error() else "no content"
                    if self._fail(node, reason):
                        nameless.setdefault(one_line(reason), []).append(node)
            for reason, mine in nameless.items():
                log(WARNING, "%s, known by node id: %s", named(mine, "node"), reason)
        return {client: node for node, client in self._client_of.items()}

    def _fail(self, node: int, reason: str) -> bool:
        """Return whether the node's id serves as its client's from now on.

        A query may fail once for a passing reason; an app that has none always does.
        """
        self._failures[node] = self._failures.get(node, 0) + 1
        self._ask_again[node] = 0.0
        if self._failures[node] < ATTEMPTS and NO_QUERY not in reason:
            return False
        self._introduce(node, {})
        return True

    def _introduce(self, node: int, about: Mapping[str, Any]) -> None:
        partitions = about.get("num-partitions", 0)
        partitions = partitions if _natural(partitions) else 0
        self._expected = max(self._expected, partitions)
        client = about.get("client-id", node)
        if not _natural(client) or (client != node and 0 < partitions <= client):
            log(
                ERROR,
                "node %d calls itself client %s of %d; its node id is used",
                node,
                one_line(repr(client)),
                partitions,
            )
            client = node
        self._ask_again.pop(node, None)
        if (other := self._node_of(client)) is not None:
            log(
                ERROR,
                "node %d calls itself client %d, which is node %d as long as that is connected",
                node,
                client,
                other,
            )
            self._waiting[node] = client
            return
        self._take(client, node)

    def _node_of(self, client: int) -> int | None:
        """Return the connected node that is ``client``, if there is one."""
        node = self._last.get(client)
        return node if node is not None and self._client_of.get(node) == client else None

    def _take(self, client: int, node: int) -> None:
        before = self._last.get(client, node)
        if before != node:
            log(INFO, "client %d is now node %d and no longer node %d", client, node, before)
        self._client_of[node], self._last[client] = client, node
        self.known.add(client)


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
