"""What comes back in a phase: which replies count, and the clients' numbers as the round's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message, Metadata, MetricRecord, RecordDict
from flwr.common import log

from fl_strategies.wire import BadReply

OURS = frozenset({"examples", "eval-examples", "data-share", "weight-share"})
"""Numbers of a client that it does not report itself; under these names it reports nothing."""

SPREAD = ("-mean", "-variance", "-min", "-max", "-smallest", "-largest")
"""How the names of the metrics end that :func:`spread` adds to a mean by examples."""


@dataclass(frozen=True)
class Asked:
    """The requests of one phase: which node was asked, as which client, from when on."""

    clients: dict[int, int]
    bytes_down: int
    started: float
    rounds: Mapping[int, int] = field(default_factory=dict)
    """By client, the round of its request where it is not the present one."""
    requests: Mapping[int, Metadata] = field(default_factory=dict)
    """By node, what identifies its request."""


class Sifted(NamedTuple):
    """Usable replies by client, ascending; why the others are not; and how many of each."""

    good: dict[int, RecordDict]
    faults: dict[int | None, str]
    counts: dict[str, int]


def sift(
    replies: Iterable[Message], asked: Asked, check: Callable[[int, RecordDict], None]
) -> Sifted:
    """Tell usable replies from others: to this phase's requests, the first, and :func:`read`.

    Each reply left out is one log line, those that never came another.
    """
    good: dict[int, RecordDict] = {}
    answered: set[int] = set()
    faults: dict[int | None, str] = {}
    bytes_up = 0
    for message in replies:
        client = None
        try:
            client = gone(message, asked)
            if client is not None:
                raise BadReply(f"none came: {message.error.reason}")
            client = sender(message, asked)
            if client in answered:
                raise BadReply("it answered before in this round")
            answered.add(client)
            bytes_up += _bytes(message)
            good[client] = read(client, message, check)
        except BadReply as fault:
            faults[client] = one_line(str(fault))
            # what no check foresaw may as well be a mistake of ours
            unforeseen = fault.__cause__
            log(
                WARNING,
                "reply of client %s left out: %s",
                client,
                faults[client],
                exc_info=unforeseen,
            )
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


def gone(message: Message, asked: Asked) -> int | None:
    """Return the client whose node is gone, where Flower says so: it names the request alone."""
    about = message.metadata
    if not message.has_error() or about.src_node_id in asked.clients:
        return None
    ids = {request.message_id: node for node, request in asked.requests.items()}
    node = ids.get(about.reply_to_message_id) if about.reply_to_message_id else None
    return None if node is None else asked.clients[node]


def sender(message: Message, asked: Asked) -> int:
    """Return the client whose request ``message`` answers; raise :class:`BadReply` if none's."""
    node = message.metadata.src_node_id
    if node not in asked.clients:
        reason = f": {message.error.reason}" if message.has_error() else ""
        raise BadReply(f"node {node} was not asked{reason}")
    if not answers(message, asked.requests.get(node)):
        raise BadReply(f"node {node} answers another request than this round's")
    return asked.clients[node]


def answers(reply: Message, request: Metadata | None) -> bool:
    """Return whether ``reply`` names ``request``, where the engine gave that an id.

    A node cannot know the id of another's request, nor is an older one's this one's.
    """
    return not (request and request.message_id) or (
        reply.metadata.reply_to_message_id == request.message_id
    )


def read(client: int, message: Message, check: Callable[[int, RecordDict], None]) -> RecordDict:
    """Return the reply's content; raise :class:`BadReply` unless it has one that passes ``check``.

    Whatever else ``check`` raises, the content has made it raise: it is the cause of a BadReply.
    """
    if message.has_error():
        raise BadReply(f"error {message.error.code}: {message.error.reason}")
    if not message.has_content():
        raise BadReply("it has no content")
    try:
        check(client, message.content)
    except BadReply:
        raise
    except Exception as error:
        raise BadReply(f"{type(error).__name__}: {error}") from error
    return message.content


def one_line(text: str) -> str:
    """Return ``text``, which others have written, as one line of at most 500 characters."""
    return " ".join(text.split())[:500]


def _bytes(message: Message) -> int:
    records = message.content.array_records.values() if message.has_content() else ()
    return sum(len(array.data) for record in records for array in record.values())


def by_client(
    good: Mapping[int, RecordDict],
    names: Mapping[str, str],
    known: Mapping[int, Mapping[str, float]],
) -> dict[int, dict[str, float]]:
    """Return ``known`` with each reply's numbers added, under other ``names`` where these say."""
    rows = {client: dict(row) for client, row in known.items()}
    for client, content in good.items():
        for name, value in only(content.metric_records).items():
            if not isinstance(value, list) and name not in OURS:
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
        with np.errstate(over="ignore", invalid="ignore"):  # of numbers near the largest
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


def word_of(content: RecordDict, name: str) -> str:
    """Return the string that the client reports as ``name``, "" if it reports none."""
    for record in content.config_records.values():
        if isinstance(word := record.get(name), str):
            return word
    return ""
