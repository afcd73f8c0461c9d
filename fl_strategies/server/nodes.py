"""Which clients are connected, through which nodes.

Flower's node ids are random and change when a node restarts. So each node is asked once for the
stable id of its client or, if it is a host, of its clients. A client belongs to the node that named
it first, as long as this node is connected. Another node that names the client later (restarted
under a new node id, or hostile) waits until the first one has left. In a shared population, which
the ServerApp's configuration allows (``shared_population``), any host may run any client; then the
client's node is :data:`ANY_HOST`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from logging import DEBUG, ERROR, INFO, WARNING
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fl_strategies.core.log import log
from fl_strategies.core.reasons import brief, named
from fl_strategies.messages.wire import MAX_SAMPLES
from fl_strategies.server.replies import is_reply_to, one_line, reason_of
from fl_strategies.server.waiting import ask

ATTEMPTS = 2
"""After so many failed queries, a node's own id serves as its client's id."""
NO_QUERY = "No query function registered", "Invalid message type: query"
"""What Flower says for an app without a query function, and for a legacy one: it is permanent."""


ANY_HOST = -1
"""Stands for the node of a client that any of the ``hosts`` may run."""


class Nodes:
    """The directory of nodes and clients.

    Parameters
    ----------
    patience : float > 0, seconds
        How long a query waits for another answer, how long a node that did not answer is not asked
        again, and how long the first round waits for another client, of those that the connected
        nodes say exist.
    population : int >= 0 (default 0)
        Size of the shared population: its clients 0, 1, ... are run by any host that offers to run
        them all, and by no other node. With 0 there is none, and such a host is refused.

    Attributes
    ----------
    known : set of int
        Ids of all clients ever connected.
    hosts : dict of int to bool
        The connected nodes that host several clients; whether they run any client.
    samples : dict of int to int
        The number of samples by client, if its host has reported it.
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
        """Wait until ``needed`` clients are connected; return each client's node.

        The first call also waits until as many clients are connected as the nodes'
        ``num-partitions`` says, or until no other has come for the time of ``patience``. The log
        tells what is waited for, and that others did not come.

        Raises ``ValueError`` where nothing is to be waited for: all nodes of a grid that no other
        can join (its ``closed`` is true) have said who they are, and are too few.
        """
        started = came = time.monotonic()
        said, before = 0.0, 0
        while True:
            nodes = self.connected(grid)
            now = time.monotonic()
            waited = now - started
            if len(nodes) > before:
                before, came = len(nodes), now
            fewer = not self._met and self._fewer_than_expected(nodes)
            more = fewer and now - came < self.patience
            if len(nodes) >= needed and not more:
                if fewer:
                    text = "%d clients are connected, and no other came for %g s: training begins"
                    log(WARNING, text, len(nodes), self.patience)
                self._met = True
                return nodes
            closed = getattr(grid, "closed", False) and not self._unmet(grid)
            if len(nodes) < needed and closed:
                why = f"; {named(sorted(self._refused), 'node')} refused" * bool(self._refused)
                if self.population and not self.hosts:
                    n = self.population
                    why = f": shared_population={n} needs nodes with client_app(..., hosts={n})"
                raise ValueError(
                    f"{needed} clients are to be connected, the grid has {len(nodes)}{why}"
                )
            if waited - said >= 10:
                said = waited
                wanted = max(needed, self._expected if more else 0)
                log(WARNING, "%d clients connected, waiting for %d", len(nodes), wanted)
            time.sleep(min(0.05 + waited / 10, 1.0))

    def connected(self, grid: Grid) -> dict[int, int]:
        """Ask new nodes for their clients; return the node of each connected client."""
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

    def _unmet(self, grid: Grid) -> set[int]:
        """Return the nodes that have not said who they are."""
        return {*grid.get_node_ids()} - self._clients_of.keys() - self._refused

    def _fewer_than_expected(self, nodes: Mapping[int, int]) -> bool:
        shared = sum(self.hosts.values())
        return len(nodes) < self._expected or 0 < shared < self._expected_hosts

    def _forget(self, online: set[int]) -> None:
        """Forget nodes that are not ``online``; nodes that wait for their clients get them."""
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
        for reply in ask(grid, queries, self.patience):
            node = reply.metadata.src_node_id
            if node not in asked or not is_reply_to(reply, asked[node]):
                continue
            del asked[node]
            if reply.has_content():
                about = reply.content.get("client")
                self._introduce(node, about if isinstance(about, ConfigRecord) else {})
            else:
                reason = reason_of(reply) if reply.has_error() else "no content"
                if self._fail(node, reason):
                    kind = NO_QUERY[0] if answers_no_query(reason) else one_line(reason)
                    nameless.setdefault(kind, []).append(node)
        for reason, mine in nameless.items():
            if reason == NO_QUERY[0]:
                log(
                    INFO,
                    "%d clients answer no queries: their nodes' ids tell them apart",
                    len(mine),
                )
            else:
                log(WARNING, "%s, known by node id: %s", named(mine, "node"), reason)
        log(DEBUG, "clients by node: %s", self._clients_of)

    def _fail(self, node: int, reason: str) -> bool:
        """Return whether the node's id serves as its client's id from now on.

        A query may fail once for a temporary reason; without a query function it always fails.
        """
        self._failures[node] = self._failures.get(node, 0) + 1
        self._ask_again[node] = 0.0
        if self._failures[node] < ATTEMPTS and not answers_no_query(reason):
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
                "node %s calls itself client %s of %d; its node id is used",
                brief(node),
                one_line(repr(client)),
                partitions,
            )
            client = node
        self._clients_of[node] = (client,)
        self._claim(node, (client,), "calls itself")

    def _introduce_host(self, node: int, about: Mapping[str, Any]) -> None:
        """Accept a node that hosts its own clients, if it names valid ids, each once.

        ``num-partitions`` does not limit these ids: Flower's simulation counts nodes by it.
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
        """Accept a node that runs any client of the population, if it is the shared one."""
        population = about["any-of"]
        if not self.population or not _natural(population) or population != self.population:
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
        """Note the sample numbers that a host reports; they are used only to spread work."""
        if "samples" not in about:
            return
        samples = about["samples"]
        listed = isinstance(samples, list) and len(samples) == len(clients)
        if not listed or not all(_natural(count) and count <= MAX_SAMPLES for count in samples):
            log(WARNING, "node %s gives no usable numbers of its clients' samples", brief(node))
            return
        for client, count in zip(clients, samples, strict=True):
            self.samples.setdefault(client, count)

    def _refuse(self, node: int, why: str) -> None:
        log(ERROR, "node %s %s; it is not asked", brief(node), why)
        self._refused.add(node)

    def _claim(self, node: int, clients: Iterable[int], verb: str) -> None:
        """Give ``node`` those ``clients`` that no connected node has; it waits for the others."""
        waits = [client for client in clients if not self._take(client, node)]
        if not waits:
            return
        self._waiting[node] = waits
        if waits[0] < self.population:
            told = "node %s %s %s, of the population that hosts share"
            log(ERROR, told, brief(node), verb, named(waits))
            return
        log(
            ERROR,
            "node %s %s %s, which is node %s as long as that is connected",
            brief(node),
            verb,
            named(waits),
            brief(self._node_of[waits[0]]),
        )

    def _take(self, client: int, node: int) -> bool:
        """Return whether ``client`` now belongs to ``node``: to no other node, and not shared."""
        if client < self.population or client in self._node_of:
            return False
        before = self._last.get(client, node)
        if before != node:
            told = "client %d is now node %s and no longer node %s"
            log(INFO, told, client, brief(node), brief(before))
        self._node_of[client] = self._last[client] = node
        self.known.add(client)
        return True


def answers_no_query(reason: str) -> bool:
    """Return whether a client's app has no function for a query, and never will."""
    return any(text in reason for text in NO_QUERY)


def _natural(value: object) -> bool:
    """Return whether a node may mean this as an id or a number: 0, 1, ..., of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64
