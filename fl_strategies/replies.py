"""What comes back in a phase: which replies count, and the clients' numbers as the round's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.common import log

from fl_strategies.wire import BadReply


@dataclass(frozen=True)
class Asked:
    """The requests of one phase: which node was asked, as which client, from when on."""

    clients: dict[int, int]
    bytes_down: int
    started: float
    rounds: Mapping[int, int] = field(default_factory=dict)
    """By client, the round of its request where it is not the present one."""
    requests: Sequence[Message] = ()

    def client(self, reply: Message) -> int | None:
        """Return the client that ``reply`` is about, None if it was not asked.

        Where a node is gone, Flower answers itself and names the request alone.
        """
        about = reply.metadata
        node = about.src_node_id
        if node not in self.clients and reply.has_error() and about.reply_to_message_id:
            ids = {m.metadata.message_id: m.metadata.dst_node_id for m in self.requests}
            node = ids.get(about.reply_to_message_id, node)
        return self.clients.get(node)


class Sifted(NamedTuple):
    """Usable replies by client, ascending; why the others are not; and how many of each."""

    good: dict[int, RecordDict]
    faults: dict[int | None, str]
    counts: dict[str, int]


def sift(
    replies: Iterable[Message], asked: Asked, check: Callable[[int, RecordDict], None]
) -> Sifted:
    """Tell usable replies from others: from nodes asked, once, no error, and passing ``check``.

    Each reply left out is one log line, those that never came another.
    """
    good: dict[int, RecordDict] = {}
    answered: set[int] = set()
    faults: dict[int | None, str] = {}
    bytes_up = 0
    for message in replies:
        node = message.metadata.src_node_id
        client = asked.client(message)
        try:
            reason = f": {message.error.reason}" if message.has_error() else ""
            if client is None:
                raise BadReply(f"node {node} was not asked{reason}")
            if node not in asked.clients:
                raise BadReply(f"none came{reason}")
            if client in answered:
                raise BadReply("it answered before in this round")
            answered.add(client)
            if message.has_error():
                raise BadReply(f"error {message.error.code}: {message.error.reason}")
            for arrays in message.content.array_records.values():
                bytes_up += sum(len(array.data) for array in arrays.values())
            check(client, message.content)
            good[client] = message.content
        except BadReply as fault:
            faults[client] = str(fault)
            log(WARNING, "reply of client %s left out: %s", client, fault)
    if lost := sorted(set(asked.clients.values()) - answered):
        log(WARNING, "no reply from %d clients: %s", len(lost), lost[:20])
    counts = {
        "clients-asked": len(asked.clients),
        "clients-used": len(good),
        "clients-rejected": len(answered) - len(good),
        "clients-lost": len(lost),
        "bytes-down": asked.bytes_down,
        "bytes-up": bytes_up,
    }
    return Sifted(dict(sorted(good.items())), faults, counts)


def by_client(
    good: Mapping[int, RecordDict],
    names: Mapping[str, str],
    known: Mapping[int, Mapping[str, float]],
) -> dict[int, dict[str, float]]:
    """Return ``known`` with each reply's numbers added, under other ``names`` where these say."""
    rows = {client: dict(row) for client, row in known.items()}
    for client, content in good.items():
        for name, value in only(content.metric_records).items():
            if not isinstance(value, list):
                rows.setdefault(client, {})[names.get(name, name)] = value
    return rows


def spread(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Each metric's mean by examples, and over clients its mean, variance, min and max, and its
    value at the client with the fewest examples and at the one with the most."""
    values: dict[str, list[tuple[float, float]]] = {}
    for content in contents:
        record = only(content.metric_records)
        for name, value in record.items():
            if name != weighted_by and not isinstance(value, list):
                values.setdefault(name, []).append((float(value), float(record[weighted_by])))
    metrics = MetricRecord()
    for name, pairs in values.items():
        each = np.array([value for value, _ in pairs])
        metrics[name] = float(np.average(each, weights=[weight for _, weight in pairs]))
        metrics[f"{name}-mean"] = float(each.mean())
        metrics[f"{name}-variance"] = float(each.var())
        metrics[f"{name}-min"] = float(each.min())
        metrics[f"{name}-max"] = float(each.max())
        metrics[f"{name}-smallest"] = min(pairs, key=lambda pair: pair[1])[0]
        metrics[f"{name}-largest"] = max(pairs, key=lambda pair: pair[1])[0]
    return metrics


def only(records: Mapping[str, Any]) -> Any:
    """Return the one record of a mapping that has one."""
    return next(iter(records.values()))


def nonce_of(content: RecordDict) -> str:
    """Return the nonce of the client's state, "" if it reports none."""
    for record in content.config_records.values():
        if isinstance(nonce := record.get("state-nonce"), str):
            return nonce
    return ""
