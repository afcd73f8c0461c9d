"""The replies of a phase: which of them count, and the round's metrics from clients' numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import DEBUG, WARNING
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
from flwr.app import ConfigRecord, Message, Metadata, MetricRecord, RecordDict

from fl_strategies.core.log import log
from fl_strategies.core.metric_names import BUSY, is_taken
from fl_strategies.core.reasons import TRACEBACK, brief, by_reason, named, root_cause
from fl_strategies.core.records import BadReply, Reply
from fl_strategies.messages.folding import Fold
from fl_strategies.messages.hosting import busy_seconds, unpack_reply
from fl_strategies.messages.wire import MAX_METRICS, Content, Failed
from fl_strategies.server.asked import Asked, Request

T = TypeVar("T")

MOST_HOSTS = 16
"""The most hosts whose share of a phase is shown one by one."""

Naming: TypeAlias = Callable[[str], str]
"""Returns a number's metric name: ``metric_names.in_training`` or ``in_evaluation``."""


@dataclass(frozen=True)
class Sifted(Generic[T]):
    """The usable replies, by client, ascending; the faults of the others; their counts.

    ``unusable`` are the faults of clients that did answer; ``busy`` holds, by host, the seconds for
    which it says that it worked.
    """

    good: dict[int, T]
    faults: dict[int | None, str]
    counts: dict[str, int]
    unusable: dict[int, str]
    busy: dict[int, float] = field(default_factory=dict)


def sift(
    replies: Iterable[Message],
    asked: Asked,
    read: Callable[[int, Content], T],
    check: Callable[[Sequence[T]], Mapping[int, str]] = lambda good: {},
    check_fold: Callable[[Sequence[T]], None] = lambda folded: None,
    told: set[str] | None = None,
) -> Sifted[T]:
    """Tell usable replies from the rest.

    A usable reply answers a request of this phase, is the first from its client, and passes
    ``read`` and ``check``, which returns faults by client. ``check_fold`` raises
    :class:`BadReply` if replies that share one mean contradict it. Replies are read in the order
    of clients, not of arrival. The log has one line for each distinct reason not to use replies,
    and one for clients without a reply. The set ``told`` holds the errors of clients that the log
    has already: these are for debugging alone.
    """
    told = set() if told is None else told
    good: dict[int, T] = {}
    came: dict[int, Content | BadReply] = {}
    again: list[int] = []
    failed: set[int] = set()
    found: list[tuple[int | None, str]] = []
    unforeseen: dict[str, BaseException | None] = {}
    bytes_up = 0
    busy: dict[int, float] = {}

    def left_out(client: int | None, fault: BadReply) -> None:
        reason = one_line(str(fault))
        found.append((client, reason))
        # an error that no check foresaw may be our mistake
        unforeseen.setdefault(reason, fault.__cause__)

    for message in replies:
        lost = lost_request(message, asked)
        if lost is not None:
            for client in lost.clients:
                left_out(client, BadReply(f"none came: {root_cause(message.error.reason)}"))
            continue
        try:
            request = sender(message, asked)
        except BadReply as fault:
            left_out(None, fault)
            continue
        part = len(request.clients) / len(request.together or request.clients)
        bytes_up += int(part * _bytes(message))
        if request.hosted and message.has_content():
            seconds = part * busy_seconds(message.content)
            busy[request.node] = busy.get(request.node, 0.0) + seconds
        for client, content in contents(message, request).items():
            if client not in request.clients:
                if client in request.together:
                    continue
                left_out(
                    None,
                    BadReply(
                        f"node {brief(request.node)} answers for client {client}, of which it"
                        " was not asked"
                    ),
                )
            elif client in came:
                again.append(client)
            else:
                came[client] = content
    for client, content in sorted(came.items(), key=lambda pair: pair[0]):
        failed |= {client} if isinstance(content, Failed) else set()
        try:
            good[client] = content_as(client, content, read)
        except BadReply as fault:
            left_out(client, fault)
    for client, why in check([*good.values()]).items():
        del good[client]
        left_out(client, BadReply(why))
    fold_of = {client: getattr(content, "fold", None) for client, content in came.items()}
    folds: dict[int, Fold] = {id(fold): fold for fold in fold_of.values() if fold is not None}
    for fold in folds.values():
        mine = [client for client in fold.clients if fold_of.get(client) is fold]
        try:
            if spoilt := [c for c in fold.clients if c not in mine or c not in good]:
                said = f"its host folded it with {named(spoilt)}, which cannot be taken out"
                raise BadReply(said)
            check_fold([good[client] for client in mine])
        except BadReply as fault:
            for client in [client for client in mine if client in good]:
                del good[client]
                left_out(client, fault)
    for client in again:  # after the fault of the first
        left_out(client, BadReply("it answered before in this round"))
    for reason, clients in by_reason(found).items():
        whose = f"repl{'y' if len(clients) == 1 else 'ies'} of {named(clients)}"
        hint = TRACEBACK if failed.issuperset(clients) and reason not in told else ""
        level = DEBUG if reason in told else WARNING
        log(level, "%s left out: %s%s", whose, reason, hint, exc_info=unforeseen[reason])
        log(DEBUG, "ids: %s", clients)
        told |= {reason} if failed.issuperset(clients) else set()
    if missing := sorted(set(asked.clients).difference(came, asked.late)):
        log(WARNING, "no reply from %s", named(missing))
        log(DEBUG, "ids: %s", missing)
    counts = {
        "clients-asked": len(asked.clients),
        "clients-used": len(good),
        "clients-rejected": len(came) - len(good),
        "clients-failed": len(failed),  # of the rejected clients, those that answered by an error
        "clients-lost": len(missing),
        "bytes-down": asked.bytes_down,
        "bytes-up": bytes_up,
    }
    first = dict(reversed(found))
    unusable = {client: first[client] for client in sorted(came.keys() - good.keys())}
    return Sifted(good, dict(found), counts, unusable, busy)


def lost_request(message: Message, asked: Asked) -> Request | None:
    """Return the request of a lost node if Flower reports one; it names only that."""
    about = message.metadata
    if not message.has_error() or about.src_node_id in asked.by_node:
        return None
    name = about.reply_to_message_id
    if not name:
        return None
    return next((r for r in asked.requests if r.about and r.about.message_id == name), None)


def sender(message: Message, asked: Asked) -> Request:
    """Return the request that ``message`` answers; raise :class:`BadReply` if there is none."""
    node = message.metadata.src_node_id
    if node not in asked.by_node:
        reason = f": {root_cause(message.error.reason)}" if message.has_error() else ""
        raise BadReply(f"node {brief(node)} was not asked{reason}")
    found = [request for request in asked.by_node[node] if is_reply_to(message, request.about)]
    if not found:
        raise BadReply(f"node {brief(node)} answers another request than this round's")
    if len(found) == 1:
        return found[0]
    return replace(found[0], clients=tuple(c for request in found for c in request.clients))


def is_reply_to(reply: Message, request: Metadata | None) -> bool:
    """Return whether ``reply`` names ``request``, if the engine gave the request an id.

    A node cannot know the id of another node's request, and older requests have other ids.
    """
    return not (request and request.message_id) or (
        reply.metadata.reply_to_message_id == request.message_id
    )


def contents(message: Message, request: Request) -> Mapping[int, Content | BadReply]:
    """Return, by client, the content or the fault in ``message``, a reply to ``request``.

    If a host's whole reply is wrong, all clients of the request have this fault.
    """
    fault: BadReply | None = None
    if message.has_error():
        fault = Failed(root_cause(message.error.reason))
    elif not message.has_content():
        fault = BadReply("it has no content")
    elif not request.hosted:
        return {request.clients[0]: cast(Content, message.content)}
    else:
        try:
            return unpack_reply(message.content, folds=request.folds)
        except BadReply as found:
            fault = found
    return dict.fromkeys(request.clients, fault)


def content_as(client: int, content: Content | BadReply, read: Callable[[int, Content], T]) -> T:
    """Return ``read(content)``; raise :class:`BadReply` if the content is bad.

    Any other exception of ``read`` is due to the content, and becomes the cause of a BadReply.
    """
    if isinstance(content, BadReply):
        raise content
    try:
        return read(client, content)
    except BadReply:
        raise
    except Exception as error:
        raise BadReply(f"{type(error).__name__}: {error}") from error


def one_line(text: str) -> str:
    """Return a foreign ``text`` as one line of at most 500 characters.

    Characters that a terminal would obey or not show are escaped as in Python.
    """
    line = " ".join(text.split())[:500]
    shown = [c if c.isprintable() else c.encode("unicode_escape").decode() for c in line]
    return "".join(shown)[:500]


def as_records(content: Any) -> RecordDict:
    """Return a client's numbers and texts as Flower's records."""
    if isinstance(content, RecordDict):
        return content
    said: Any = {**content.metric_records, **content.config_records}
    kinds = {**dict.fromkeys(content.metric_records, MetricRecord),
             **dict.fromkeys(content.config_records, ConfigRecord)}  # fmt: skip
    return RecordDict({name: kinds[name](dict(record)) for name, record in said.items()})


def _bytes(message: Message) -> int:
    records = message.content.array_records.values() if message.has_content() else ()
    return sum(len(array.data) for record in records for array in record.values())


def by_client(
    replies: Iterable[Reply],
    samples: str,
    called: Naming,
    known: Mapping[int, Mapping[str, float]],
) -> dict[int, dict[str, float]]:
    """Return ``known`` with each reply's numbers added, and its samples as ``samples``."""
    rows = {client: dict(row) for client, row in known.items()}
    for reply in replies:
        row = rows.setdefault(reply.client, {})
        row |= _numbers(reply, called)
        row[samples] = reply.num_examples
    return rows


def summary(replies: Iterable[Reply], called: Naming = str) -> MetricRecord:
    """Summarize each metric over clients: its mean weighted by samples, its plain mean, variance,
    minimum and maximum, and its value at the clients with the fewest and the most samples.

    If there are more than ``MAX_METRICS`` names, those that most clients report are summarized; a
    log line counts the others.
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
        with np.errstate(over="ignore", invalid="ignore"):  # large numbers overflow
            metrics[name] = float(np.average(each, weights=[weight for _, weight in pairs]))
            metrics[f"{name}-mean"] = float(each.mean())
            metrics[f"{name}-variance"] = float(each.var())
        metrics[f"{name}-min"] = float(each.min())
        metrics[f"{name}-max"] = float(each.max())
        metrics[f"{name}-smallest"] = min(pairs, key=lambda pair: pair[1])[0]
        metrics[f"{name}-largest"] = max(pairs, key=lambda pair: pair[1])[0]
    return metrics


def _numbers(reply: Reply, called: Naming) -> dict[str, float]:
    """Return the reply's numbers under their metrics' names."""
    return renamed({n: v for n, v in reply.numbers.items() if not isinstance(v, list)}, called)


def renamed(numbers: Mapping[str, Any], called: Naming) -> dict[str, Any]:
    """Return ``numbers`` under their metrics' names; of "loss" and "eval-loss" the latter stays."""
    kept = {name: value for name, value in numbers.items() if called(name) == name}
    return {called(name): value for name, value in numbers.items()} | kept


def taken_names(replies: Iterable[Reply], called: Naming) -> list[str]:
    """Return the names of clients' numbers that belong to another source."""
    reported = {name for reply in replies for name in reply.numbers}
    return sorted(name for name in reported if is_taken(name, called(name)))


def busy_shares(
    busy: Mapping[int, float], hosts: Iterable[int], seconds: float
) -> dict[str, float]:
    """Return the share of a phase's ``seconds`` that each host worked, by its number in ``hosts``.

    For more than ``MOST_HOSTS`` hosts only the least and the largest share.
    """
    shares = [min(busy.get(host, 0.0) / max(seconds, 1e-9), 1.0) for host in sorted(hosts)]
    if not shares:
        return {}
    named = {f"{BUSY}-{place}": share for place, share in enumerate(shares)}
    ends = {f"{BUSY}-min": min(shares), f"{BUSY}-max": max(shares)}
    return (named if len(shares) <= MOST_HOSTS else {}) | ends


def device_of(reply: Reply) -> str:
    """Return the kind of device on which the client says it computed (``cuda``), or ""."""
    word = reply.words.get("device", "")
    return word if word.isascii() and word.isalnum() and len(word) <= 16 else ""
