"""The replies of a phase: which of them count, and the round's metrics from clients' numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import DEBUG, WARNING
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict

from fl_strategies.core.log import log
from fl_strategies.core.metric_names import BUSY
from fl_strategies.core.reasons import TRACEBACK, brief, by_reason, named
from fl_strategies.core.records import BadReply, Reply
from fl_strategies.messages.hosting import busy_seconds, unpack_reply
from fl_strategies.messages.wire import MAX_METRICS, Content, Failed
from fl_strategies.server.asked import Asked, Request

T = TypeVar("T")

LONGEST = 100_000
"""The most characters of a reason that are read: the text comes from a client."""
MOST_HOSTS = 16
"""The most hosts whose share of a phase is shown one by one."""

FOR_LEGACY = (
    "its app is ClientApp(client_fn=...), which a legacy server alone can ask: make it by"
    " client_app(client_fn), or run the strategy in a legacy server, by as_legacy(strategy)"
)
"""Why a client fails at which Flower looks for what a legacy server sends."""

Names: TypeAlias = Mapping[str, str]
"""The metric's name by the name of a client's number."""
Fault: TypeAlias = tuple[int | None, BadReply]
"""Why a client's reply is not used; no client, if it answers no request."""


@dataclass(frozen=True)
class Sifted(Generic[T]):
    """The usable replies, by client, ascending; the faults of the others; their counts.

    ``unusable`` are the faults of clients that did answer; ``busy`` holds, by host, the seconds for
    which it says that it worked, ``took`` by client those from request to reply by a virtual clock;
    ``answers`` are each client's first, usable or not.
    """

    good: dict[int, T]
    faults: dict[int | None, str]
    counts: dict[str, int]
    unusable: dict[int, str]
    busy: dict[int, float] = field(default_factory=dict)
    took: Mapping[int, float] = field(default_factory=dict)
    answers: Mapping[int, Content | BadReply] = field(default_factory=dict)


@dataclass
class Arrived:
    """What came of a phase: each client's first answer, and who answered ``again``.

    ``faults`` are those of messages that answer no request, or say that one was lost.
    """

    first: dict[int, Content | BadReply] = field(default_factory=dict)
    again: list[int] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    bytes_up: int = 0
    busy: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, replies: Iterable[Message], asked: Asked) -> Arrived:
        """Return what ``replies`` have, in the order of their arrival."""
        came = cls()
        for message in replies:
            if message.has_error() and (lost := lost_request(message, asked)) is not None:
                fault = BadReply(f"none came: {reason_of(message)}")
                came.faults += [(client, fault) for client in lost.clients]
                continue
            try:
                came.take(message, sender(message, asked))
            except BadReply as fault:
                came.faults.append((None, fault))
        return came

    def take(self, message: Message, request: Request) -> None:
        """Take in a reply to ``request``."""
        part = len(request.clients) / len(request.together or request.clients)
        answers = contents(message, request)
        folded = sum(getattr(answer, "fold", None) is not None for answer in answers.values())
        self.bytes_up += request.folded_bytes * folded or int(part * _bytes(message))
        if request.hosted and message.has_content():
            seconds = part * busy_seconds(message.content)
            self.busy[request.node] = self.busy.get(request.node, 0.0) + seconds
        for client, content in answers.items():
            if client not in request.clients:
                if client not in request.together:
                    self.faults.append((None, _not_asked(request.node, client)))
            elif client in self.first:
                self.again.append(client)
            else:
                self.first[client] = content


def _not_asked(node: int, client: int) -> BadReply:
    return BadReply(f"node {brief(node)} answers for client {client}, of which it was not asked")


def sift(
    replies: Iterable[Message],
    asked: Asked,
    read: Callable[[int, Content], T],
    check: Callable[[dict[int, T]], dict[int, BadReply]] = lambda good: {},
    told: set[str] | None = None,
) -> Sifted[T]:
    """Tell usable replies from the rest.

    A usable reply answers a request of this phase, is the first from its client, and passes
    ``read`` and ``check``, which returns faults by client. Replies are read in the order of
    clients, not of arrival. ``told`` holds the errors of clients that the log has already.
    """
    came = Arrived.of(replies, asked)
    faults, good = came.faults, dict[int, T]()
    for client in sorted(came.first):
        content = came.first[client]
        try:
            if isinstance(content, BadReply):
                raise content
            good[client] = read(client, content)
        except BadReply as fault:
            faults.append((client, fault))
        except Exception as error:  # which is due to the content
            unforeseen = BadReply(f"{type(error).__name__}: {error}")
            unforeseen.__cause__ = error
            faults.append((client, unforeseen))
    for client, why in check(good).items():
        del good[client]
        faults.append((client, why))
    faults += [(client, BadReply("it answered before in this round")) for client in came.again]
    reasons = [(client, one_line(str(fault))) for client, fault in faults]
    failed = {client for client, content in came.first.items() if isinstance(content, Failed)}
    missing = sorted(set(asked.clients).difference(came.first, asked.late))
    if reasons or missing:
        causes = {reason: f.__cause__ for (_, reason), (_, f) in zip(reasons, faults, strict=True)}
        _log_left_out(reasons, causes, failed, missing, set() if told is None else told)
    counts = {
        "clients-asked": len(asked.clients),
        "clients-used": len(good),
        "clients-rejected": len(came.first) - len(good),
        "clients-failed": len(failed),  # of the rejected clients, those that answered by an error
        "clients-lost": len(missing),
        "bytes-down": asked.bytes_down,
        "bytes-up": came.bytes_up,
    }
    first = dict(reversed(reasons))
    unusable = {client: first[client] for client in sorted(came.first.keys() - good.keys())}
    return Sifted(good, dict(reasons), counts, unusable, came.busy, answers=came.first)


def _log_left_out(
    reasons: Iterable[tuple[int | None, str]],
    causes: Mapping[str, BaseException | None],
    failed: Collection[int | None],
    missing: Sequence[int],
    told: set[str],
) -> None:
    """Log a line for each distinct reason not to use replies, one for clients without a reply.

    ``causes`` are errors that no check foresaw, which may be our mistakes. An error of the clients
    that ``failed`` is for debugging alone once it was ``told``.
    """
    for reason, clients in by_reason(reasons).items():
        whose = f"repl{'y' if len(clients) == 1 else 'ies'} of {named(clients)}"
        theirs = {*clients} <= {*failed}
        hint = TRACEBACK if theirs and reason not in told else ""
        level = DEBUG if reason in told else WARNING
        log(level, "%s left out: %s%s", whose, reason, hint, exc_info=causes[reason])
        log(DEBUG, "ids: %s", clients)
        told |= {reason} if theirs else set()
    if missing:
        log(WARNING, "no reply from %s", named(missing))
        log(DEBUG, "ids: %s", missing)


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
        reason = f": {reason_of(message)}" if message.has_error() else ""
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
        reason = reason_of(message)
        legacy = "'fitins." in reason or "'evaluateins." in reason
        fault = Failed(FOR_LEGACY if legacy else reason)
    elif not message.has_content():
        fault = BadReply("it has no content")
    elif not request.hosted:
        return {request.clients[0]: Content.of(message.content)}
    else:
        try:
            return unpack_reply(message.content, folds=request.folds)
        except BadReply as found:
            fault = found
    return dict.fromkeys(request.clients, fault)


def reason_of(message: Message) -> str:
    """Return why a client failed, as its error reply says."""
    return str(message.error.reason or "no reason given")[:LONGEST]


def one_line(text: str) -> str:
    """Return a ``text`` from elsewhere as one line of at most 500 characters: its ends if longer.

    Characters that a terminal would obey or not show are escaped as in Python.
    """
    line = " ".join(text.split())
    shown = [c if c.isprintable() else c.encode("unicode_escape").decode() for c in line]
    line = "".join(shown)
    # a traceback ends with what was raised
    return line if len(line) <= 500 else f"{line[:245]} ... {line[-250:]}"


def as_records(content: Content) -> RecordDict:
    """Return what a client sent as Flower's records; of a host's client its numbers and texts."""
    numbers, words, arrays, _ = content
    return RecordDict(
        {name: MetricRecord(dict(record)) for name, record in numbers.items()}
        | {name: ConfigRecord(dict(record)) for name, record in words.items()}
        | {name: record for name, record in arrays.items() if isinstance(record, ArrayRecord)}
    )


def _bytes(message: Message) -> int:
    records = message.content.values() if message.has_content() else ()
    arrays = (array for r in records if isinstance(r, ArrayRecord) for array in r.values())
    return sum(len(array.data) for array in arrays)


def names_of(replies: Iterable[Reply], called: Callable[[str], str]) -> dict[str, str]:
    """Return the metric's name for each name of a number that clients report."""
    return {name: called(name) for name in {n: 0 for reply in replies for n in reply.numbers}}


def summary(
    replies: Sequence[Reply], names: Names, numbers: Mapping[int, Mapping[str, float]]
) -> dict[str, float | list[float]]:
    """Summarize each metric over clients: its mean weighted by samples, its plain mean, variance,
    minimum and maximum, and its value at the clients with the fewest and the most samples.

    If there are more than ``MAX_METRICS`` names, those that most clients report are summarized; a
    log line counts the others. A list has its weighted mean alone, entry by entry, as Flower has
    it, over the clients whose list has the most usual length; a log line names lists of others, and
    what is a list of some clients and a number of others, which is left out.
    ``numbers`` are those of each client, under their metrics' names.
    """
    values: dict[str, list[tuple[float, float]]] = {}
    for reply in replies:
        for name, value in numbers[reply.client].items():
            values.setdefault(name, []).append((float(value), float(reply.num_examples)))
    if len(values) > MAX_METRICS:
        first = sorted(values, key=lambda name: (-len(values[name]), name))[:MAX_METRICS]
        log(WARNING, "%d metrics of clients are left out", len(values) - MAX_METRICS)
        values = {name: values[name] for name in first}
    metrics: dict[str, float | list[float]] = {**_mean_lists(replies, names)}
    if mixed := sorted(metrics.keys() & values.keys()):
        log(WARNING, "metrics that are lists of some clients are left out: %.300r", mixed)
    for name in mixed:
        del metrics[name], values[name]
    for name, pairs in values.items():
        each, weights = np.array(pairs).T
        with np.errstate(over="ignore", invalid="ignore"):  # large numbers overflow
            statistics = {
                "": np.average(each, weights=weights),
                "-mean": each.mean(),
                "-variance": each.var(),
                "-min": each.min(),
                "-max": each.max(),
                "-smallest": each[weights.argmin()],
                "-largest": each[weights.argmax()],
            }
        metrics |= {f"{name}{ending}": float(value) for ending, value in statistics.items()}
    return metrics


def _mean_lists(replies: Sequence[Reply], names: Names) -> dict[str, list[float]]:
    """Return the mean of each list, weighted by samples, over those of the most usual length."""
    lists: dict[str, list[tuple[list[Any], float]]] = {}
    for reply in replies:
        found = {n: v for n, v in reply.numbers.items() if isinstance(v, list)}
        for name, values in renamed(found, names).items() if found else ():
            lists.setdefault(name, []).append((values, float(reply.num_examples)))
    means, left_out = dict[str, list[float]](), list[str]()
    for name, pairs in sorted(lists.items())[:MAX_METRICS]:
        (usual, count), *_ = Counter(len(values) for values, _ in pairs).most_common(1)
        left_out += [name] if count < len(pairs) else []
        rows, weights = zip(*(pair for pair in pairs if len(pair[0]) == usual), strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            means[name] = np.average(np.array(rows, float), axis=0, weights=weights).tolist()
    if left_out:
        log(WARNING, "clients' lists of another length than most are left out: %.300r", left_out)
    return means


def renamed(numbers: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return ``numbers`` under their metrics' names; of "loss" and "eval-loss" the latter stays."""
    kept = {name: value for name, value in numbers.items() if names[name] == name}
    return {names[name]: value for name, value in numbers.items()} | kept


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
