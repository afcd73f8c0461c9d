"""Which clients are connected, through which nodes.

Flower's node ids are random and change when a node restarts, so each node is asked once for the
stable id of its client, or, if it is a host, of its clients. A client is with the node that said so
first, as long as this one is connected: another that says so later (restarted under a new node id,
or hostile) waits until then. In a shared population, which the ServerApp's configuration allows
(``shared_population``), any host may run any client, and a client is with :data:`ANY_HOST`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
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


ANY_HOST = -1
"""In place of the node of a client that any of the ``hosts`` may run."""


class Nodes:
    """The directory of nodes and clients.

    Parameters
    ----------
    patience : float > 0, seconds
        How long a query may take, how long a node that did not answer one is left alone, and how
        long the first round waits for nodes that the connected ones say exist.
    population : int >= 0 (default 0)
        Size of the shared population: its clients 0, 1, ... are run by any host that offers to run
        them all, and by no other node. 0: there is none, and such a node is refused.

    Attributes
    ----------
    known : set of int
        Ids of all clients ever connected.
    hosts : dict of int to bool
        The connected nodes that take messages about several clients; whether they run any client.
    samples : dict of int to int
        By client, the number of its samples, where its host has said that.
    """

    def __init__(self, patience: float, population: int = 0) -> None:
        self.patience, self.population = patience, population
        self.known: set[int] = set()
        self.hosts: dict[int, bool] = {}
        self.samples: dict[int, int] = {}
        self._clients_of: dict[int, Sequence[int]] = {}
        self._waiting: dict[int, list[int]] = {}
        self._refused: set[int] = set()
        self._node_of: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._failures: dict[int, int] = {}
        self._ask_again: dict[int, float] = {}
        self._expected = 0
        self._expected_hosts = 0
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
            more = not self._met and waited < self.patience and self._fewer_than_expected(nodes)
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
        self._forget(online)
        now = time.monotonic()
        new = [
            node
            for node in sorted(online - self._clients_of.keys() - self._refused)
            if self._ask_again.get(node, now) <= now
        ]
        if new:
            self._ask(new, grid, now)
        return dict(self._node_of)

    def _fewer_than_expected(self, nodes: Mapping[int, int]) -> bool:
        shared = sum(self.hosts.values())
        return len(nodes) < self._expected or 0 < shared < self._expected_hosts

    def _forget(self, online: set[int]) -> None:
        """Let nodes go that are not ``online``, and have those that wait for their clients."""
        self._refused &= online
        for node in self._clients_of.keys() - online:
            for client in self._clients_of.pop(node):
                if self._node_of.get(client) == node:
                    del self._node_of[client]
            self._waiting.pop(node, None)
            if self.hosts.pop(node, False) and not any(self.hosts.values()):
                for client in range(self.population):
                    del self._node_of[client]
        for node, clients in list(self._waiting.items()):
            self._waiting[node] = [c for c in clients if not self._take(c, node)]
            if not self._waiting[node]:
                del self._waiting[node]

    def _ask(self, new: Sequence[int], grid: Grid, now: float) -> None:
        queries = [
            Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in new
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
        self._ask_again.pop(node, None)
        if "any-of" in about:
            self._introduce_any(node, about, partitions)
            return
        self._expected = max(self._expected, partitions)
        if "client-ids" in about:
            self._introduce_host(node, about)
            return
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
        self._clients_of[node] = (client,)
        self._claim(node, (client,), "calls itself")

    def _introduce_host(self, node: int, about: Mapping[str, Any]) -> None:
        """Take a node that hosts clients of its own, if these are ids, each once.

        ``num-partitions`` bounds no ids: Flower's simulation counts nodes by it.
        """
        clients = about["client-ids"]
        ids = clients if isinstance(clients, list) and all(map(_natural, clients)) else []
        if not ids or len({*ids}) < len(ids):
            self._refuse(node, f"says that it hosts {one_line(repr(clients))[:100]}")
            return
        self._clients_of[node] = ids
        self.hosts[node] = False
        self._note_samples(node, ids, about)
        self._claim(node, ids, "hosts")

    def _introduce_any(self, node: int, about: Mapping[str, Any], partitions: int) -> None:
        """Take a node that runs any client of the population, if that is the shared one."""
        population = about["any-of"]
        if not self.population or population != self.population:
            own = self.population or "no"
            self._refuse(
                node,
                f"offers to run any of {one_line(repr(population))} clients; the run's shared"
                f" population has {own} clients (shared_population): a host that is to have"
                " clients of its own lists them",
            )
            return
        self._expected_hosts = max(self._expected_hosts, partitions)
        self._clients_of[node], self.hosts[node] = (), True
        if self._node_of.get(0) != ANY_HOST:
            everybody = range(self.population)
            self._note_samples(node, everybody, about)
            self._node_of |= dict.fromkeys(everybody, ANY_HOST)
            self.known.update(everybody)

    def _note_samples(self, node: int, clients: Sequence[int], about: Mapping[str, Any]) -> None:
        """Note what a host says of its clients' samples, by which work is spread alone."""
        samples = about.get("samples", [])
        if not samples:
            return
        if len(samples) != len(clients) or not all(map(_natural, samples)):
            log(WARNING, "node %d says nothing usable of its clients' samples", node)
            return
        for client, count in zip(clients, samples, strict=True):
            self.samples.setdefault(client, count)

    def _refuse(self, node: int, why: str) -> None:
        log(ERROR, "node %d %s; it is not asked", node, why)
        self._refused.add(node)

    def _claim(self, node: int, clients: Iterable[int], verb: str) -> None:
        """Have ``node`` be those of ``clients`` that no connected one is, and wait for others."""
        waits = [client for client in clients if not self._take(client, node)]
        if not waits:
            return
        self._waiting[node] = waits
        if waits[0] < self.population:
            log(
                ERROR, "node %d %s %s, of the population that hosts share", node, verb, named(waits)
            )
            return
        log(
            ERROR,
            "node %d %s %s, which is node %d as long as that is connected",
            node,
            verb,
            named(waits),
            self._node_of[waits[0]],
        )

    def _take(self, client: int, node: int) -> bool:
        """Return whether ``client`` is now with ``node``: with no other, and not shared."""
        if client < self.population or client in self._node_of:
            return False
        before = self._last.get(client, node)
        if before != node:
            log(INFO, "client %d is now node %d and no longer node %d", client, node, before)
        self._node_of[client] = self._last[client] = node
        self.known.add(client)
        return True


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
