"""What comes back in a phase: which replies count, and the clients' numbers as the round's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from flwr.app import Message, Metadata, MetricRecord, RecordDict
from flwr.common import log

from fl_strategies.core.names import is_taken
from fl_strategies.core.reasons import by_reason, named, root_cause
from fl_strategies.core.records import BadReply, Reply
from fl_strategies.server.wire import MAX_METRICS

T = TypeVar("T")

Naming: TypeAlias = Callable[[str], str]
"""What a client's number is called: ``names.in_training`` or ``names.in_evaluation``."""


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


@dataclass(frozen=True)
class Sifted(Generic[T]):
    """What usable replies were read as, by client, ascending; why others are none; their counts.

    ``unusable`` are the faults of the clients that did answer.
    """

    good: dict[int, T]
    faults: dict[int | None, str]
    counts: dict[str, int]
    unusable: dict[int, str]


class NothingUsable(RuntimeError):
    """Round after round every reply was unusable; the text tells each cause once."""


class Patience:
    """Ends a run in which nothing can be used.

    That is after ``rounds`` training rounds in a row in which clients answered and no reply was
    usable, if two clients or more answered in them (or the only client there is). A round in which
    nobody answered does not count.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._in_a_row = 0
        self._causes: dict[str, tuple[str, set[int]]] = {}

    def settle(self, used: int, unusable: Mapping[int, str], clients: int) -> None:
        """Take note of a round; raise :class:`NothingUsable` if it was one too many.

        ``used`` replies were usable; ``clients`` is how many were ever connected.
        """
        if used:
            self._in_a_row, self._causes = 0, {}
        if used or not unusable:
            return
        self._in_a_row += 1
        for client, reason in unusable.items():
            # numbers differ from client to client where the cause is one
            self._causes.setdefault(re.sub(r"\d+", "#", reason), (reason, set()))[1].add(client)
        if self._in_a_row >= self.rounds and len(self._who()) >= min(2, clients):
            told = "; ".join(
                f"{named(sorted(who))}: {reason}" for reason, who in self._causes.values()
            )
            raise NothingUsable(f"no reply of {self._in_a_row} rounds in a row was usable: {told}")

    def _who(self) -> set[int]:
        return {client for _, who in self._causes.values() for client in who}


def sift(
    replies: Iterable[Message], asked: Asked, read: Callable[[int, RecordDict], T]
) -> Sifted[T]:
    """Tell usable replies from others: the first to each request, that ``read`` can read.

    They are read in the order of clients, whichever came first. Each distinct reason to leave
    replies out is one log line, those that never came another.
    """
    good: dict[int, T] = {}
    came: dict[int, Message] = {}
    again: list[int] = []
    failed: set[int] = set()
    found: list[tuple[int | None, str]] = []
    unforeseen: dict[str, BaseException | None] = {}
    bytes_up = 0

    def left_out(client: int | None, fault: BadReply) -> None:
        reason = one_line(str(fault))
        found.append((client, reason))
        # what no check foresaw may as well be a mistake of ours
        unforeseen.setdefault(reason, fault.__cause__)

    for message in replies:
        client = None
        try:
            client = gone(message, asked)
            if client is not None:
                raise BadReply(f"none came: {root_cause(message.error.reason)}")
            client = sender(message, asked)
            if client in came:
                again.append(client)
                continue
            came[client] = message
            bytes_up += _bytes(message)
        except BadReply as fault:
            left_out(client, fault)
    for client, message in sorted(came.items()):
        failed |= {client} if message.has_error() else set()
        try:
            good[client] = content_as(client, message, read)
        except BadReply as fault:
            left_out(client, fault)
    for client in again:  # after what was wrong with the first
        left_out(client, BadReply("it answered before in this round"))
    for reason, clients in by_reason(found).items():
        whose = f"repl{'y' if len(clients) == 1 else 'ies'} of {named(clients)}"
        log(WARNING, "%s left out: %s", whose, reason, exc_info=unforeseen[reason])
    if lost := sorted(set(asked.clients.values()) - came.keys()):
        log(WARNING, "no reply from %d clients: %s", len(lost), lost[:20])
    counts = {
        "clients-asked": len(asked.clients),
        "clients-used": len(good),
        "clients-rejected": len(came) - len(good),
        "clients-failed": len(failed),  # of the rejected, those that answered by an error
        "clients-lost": len(lost),
        "bytes-down": asked.bytes_down,
        "bytes-up": bytes_up,
    }
    first = dict(reversed(found))
    unusable = {client: first[client] for client in sorted(came.keys() - good.keys())}
    return Sifted(good, dict(found), counts, unusable)


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
        reason = f": {root_cause(message.error.reason)}" if message.has_error() else ""
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


def content_as(client: int, message: Message, read: Callable[[int, RecordDict], T]) -> T:
    """Return what ``read`` makes of the content; raise :class:`BadReply` if it has none, or bad.

    Whatever else ``read`` raises, the content has made it raise: it is the cause of a BadReply.
    """
    if message.has_error():
        raise BadReply(f"error {message.error.code}: {root_cause(message.error.reason)}")
    if not message.has_content():
        raise BadReply("it has no content")
    try:
        return read(client, message.content)
    except BadReply:
        raise
    except Exception as error:
        raise BadReply(f"{type(error).__name__}: {error}") from error


def one_line(text: str) -> str:
    """Return ``text``, which others have written, as one line of at most 500 characters.

    What a terminal would take for a command, or not show, is escaped as Python writes it.
    """
    line = " ".join(text.split())[:500]
    shown = [c if c.isprintable() else c.encode("unicode_escape").decode() for c in line]
    return "".join(shown)[:500]


def _bytes(message: Message) -> int:
    records = message.content.array_records.values() if message.has_content() else ()
    return sum(len(array.data) for record in records for array in record.values())


def by_client(
    replies: Iterable[Reply],
    examples: str,
    called: Naming,
    known: Mapping[int, Mapping[str, float]],
) -> dict[int, dict[str, float]]:
    """Return ``known`` with each reply's numbers added, and its samples as ``examples``."""
    rows = {client: dict(row) for client, row in known.items()}
    for reply in replies:
        row = rows.setdefault(reply.client, {})
        row |= _numbers(reply, called)
        row[examples] = reply.num_examples
    return rows


def spread(replies: Iterable[Reply], called: Naming = str) -> MetricRecord:
    """Each metric's mean by samples, and over clients its mean, variance, min and max, and its
    value at the client with the fewest samples and at the one with the most.

    Of more than ``MAX_METRICS`` names those that most clients report; a log line counts the others.
    """
    values: dict[str, list[tuple[float, float]]] = {}
    for reply in replies:
        for name, value in _numbers(reply, called).items():
            values.setdefault(name, []).append((float(value), float(reply.num_examples)))
    if len(values) > MAX_METRICS:
        first = sorted(values, key=lambda name: (-len(values[name]), name))[:MAX_METRICS]
        log(WARNING, "%d metrics of clients are left out", len(values) - MAX_METRICS)
        values = {name: values[name] for name in first}
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


def _numbers(reply: Reply, called: Naming) -> dict[str, float]:
    """Return the reply's numbers, as they are called."""
    return renamed({n: v for n, v in reply.numbers.items() if not isinstance(v, list)}, called)


def renamed(numbers: Mapping[str, Any], called: Naming) -> dict[str, Any]:
    """Return ``numbers`` as they are called; of "loss" and "eval-loss" the latter stays."""
    kept = {name: value for name, value in numbers.items() if called(name) == name}
    return {called(name): value for name, value in numbers.items()} | kept


def taken_names(replies: Iterable[Reply], called: Naming) -> list[str]:
    """Return the names under which clients report, and which are another's."""
    reported = {name for reply in replies for name in reply.numbers}
    return sorted(name for name in reported if is_taken(name, called(name)))


def device_of(reply: Reply) -> str:
    """Return the kind of device that the client says it computed on (``cuda``), "" for none."""
    word = reply.words.get("device", "")
    return word if word.isascii() and word.isalnum() and len(word) <= 16 else ""
