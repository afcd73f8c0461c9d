"""Reading: from a phase's replies to usable uploads and the phase's metrics.

Each reply is decoded and checked once: wire > identity > intact > clipped > bound > ledger > rule.
What it must hold stands in what was asked (:class:`.Policy`), so that a reply is read without a
strategy. A bad reply is not used, and the log says why.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from logging import INFO, WARNING
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message, MetricRecord

from fl_strategies.core.clipping import norm
from fl_strategies.core.layout import Arrays
from fl_strategies.core.ledger import Ledger
from fl_strategies.core.log import log
from fl_strategies.core.reasons import named
from fl_strategies.core.records import BadReply, Reply, Round, Upload
from fl_strategies.messages.codes import CODEC, DOWNLOAD, SHORT, decompressed
from fl_strategies.messages.folding import DISTANCE, ROUNDING, Fold, decode_fold
from fl_strategies.messages.heeding import CHECKSUMS, UNREAD
from fl_strategies.messages.wire import Content, decode_model, decoded, open_reply, upload_of
from fl_strategies.server.asked import Asked, Policy
from fl_strategies.server.composition import check_clipped, check_intact
from fl_strategies.server.replies import (
    Sifted,
    as_records,
    busy_shares,
    device_of,
    names_of,
    renamed,
    sift,
    summary,
)
from fl_strategies.server.timing import in_time


class Read(NamedTuple):
    """What was read of a phase.

    ``round`` knows its traffic, ``rows`` are clients' numbers, ``devices`` the kinds of device that
    clients name; ``faults`` are those of all unusable replies, ``unusable`` those of the clients
    that answered; ``hosts`` has the hosts' shares of work.
    """

    round: Round
    uploads: list[Upload]
    metrics: MetricRecord
    rows: dict[int, dict[str, float]]
    devices: dict[int, str]
    faults: Mapping[int | None, str]
    unusable: Mapping[int, str]
    hosts: Mapping[str, float]
    seconds: float
    """How long the phase lasted by the virtual clock."""
    took: Mapping[int, float]
    """By client, the seconds of a virtual clock from request to reply."""


# ---- a reply ------------------------------------------------------------------------------------


def read(
    asked: Asked, client: int, content: Content, means: dict[int, Upload] | None = None
) -> tuple[Reply, Upload]:
    """Return a reply and its upload; raise :class:`BadReply` if it breaks what was ``asked``.

    ``means`` keeps the hosts' means that were checked, by ``id(Fold)``.
    """
    phase, fold = asked.of(client), getattr(content, "fold", None)
    policy = phase.policy
    expected = policy.expected if fold is None else policy.folded or policy.expected
    reply = open_reply(client, phase.round.number, content, expected)
    if policy.most_work is not None:
        most = policy.most_work(phase.configs.get(client, {}))
        work = min(reply.numbers["work"], most)
        reply = replace(reply, numbers={**reply.numbers, "work": work})
    if fold is not None:
        return _folded(phase, reply, fold, {} if means is None else means)
    reply = replace(reply, arrays=_arrays_of(phase, reply, content))
    if policy.tells_bound or policy.told_bound < math.inf:
        check_clipped(reply, _told_bound(policy, reply), phase.round)
    upload = upload_of(reply, policy.identity.layout, policy.extra_vectors)
    if policy.bound is not None:
        upload = policy.bound.check(upload)
    received = None if phase is asked else phase.round.received
    return reply, upload._replace(received=received)


def reply_of(asked: Asked, client: int, content: Content | BadReply) -> Reply | None:
    """Return the reply, None if it cannot be used; a client's state is not looked at."""
    try:
        return None if isinstance(content, BadReply) else read(asked, client, content)[0]
    except Exception:  # the content's fault, of which the log tells when it is used
        return None


def _arrays_of(asked: Asked, reply: Reply, content: Content) -> Arrays:
    """Return the arrays that a client sent, decompressed."""
    policy = asked.policy
    if len(content.array_records) != 1:
        raise BadReply(f"{len(content.array_records)} ArrayRecords, expected one")
    sent = next(iter(content.array_records.values()))
    codec = policy.codec if CODEC in reply.words else None
    arrays = decoded(sent) if codec else decode_model(sent, policy.wire)
    if sums := reply.words.get(CHECKSUMS):  # else not asked for, or a third-party client
        check_intact(arrays, sums, policy.identity.strategy, policy.intact, policy.wire)
    if codec is None:
        return arrays
    if (coded := reply.words[CODEC]) != policy.coded:
        raise BadReply(f"its codec is {coded!r}, the one asked for {policy.coded!r}")
    start = {} if policy.uploads_changes else asked.model
    layout = policy.identity.layout
    arrays = decompressed(arrays, layout, policy.extra_vectors, codec.decode, start)
    return decode_model(arrays, policy.wire)


def _told_bound(policy: Policy, reply: Reply) -> float:
    """Return the norm to which a wrapper told the client to clip, infinite if none did."""
    told = reply.numbers.get("clipping-norm") if policy.tells_bound else None
    return min(policy.told_bound, told if isinstance(told, int | float) else math.inf)


def _folded(
    asked: Asked, reply: Reply, fold: Fold, means: dict[int, Upload]
) -> tuple[Reply, Upload]:
    """Return a folded client's reply and upload, which is its host's mean.

    The mean is checked once. Raises :class:`BadReply` for a mean that cannot be right.
    """
    policy = asked.policy
    if (mean := means.get(id(fold))) is None:
        folded = replace(reply, arrays=decode_fold(fold, policy.wire))
        mean = upload_of(folded, policy.identity.layout, policy.extra_vectors)
        if policy.bound is not None:
            most = policy.bound.bound * (1.0 + ROUNDING)
            mean = replace(policy.bound, bound=most).check(mean)
        means[id(fold)] = mean
    numbers = dict(reply.numbers)
    distance2 = None if policy.folded is None else numbers.pop(DISTANCE)
    return replace(reply, numbers=numbers), mean._replace(
        client=reply.client,
        num_examples=reply.num_examples,
        scalars=numbers,
        round=reply.round,
        distance2=distance2,
    )


# ---- the uploads of a phase ---------------------------------------------------------------------


def refused(asked: Asked, good: Mapping[int, tuple[Reply, Upload]]) -> dict[int, BadReply]:
    """Return which uploads the rule cannot use, or a host's mean that holds them, and why."""
    why = asked.policy.unusable([upload for _, upload in good.values()])
    faults = {client: BadReply(reason) for client, reason in why.items()}
    fold_of = {
        client: fold
        for client, (reply, _) in good.items()
        if client not in faults and (fold := getattr(reply.content, "fold", None)) is not None
    }
    for fold in {id(fold): fold for fold in fold_of.values()}.values():
        mine = [client for client in fold.clients if fold_of.get(client) is fold]
        try:
            if spoilt := [client for client in fold.clients if client not in mine]:
                said = f"its host sent one mean of it and {named(spoilt)}"
                raise BadReply(f"{said}, which cannot be taken out")
            check_fold(asked, [good[client][1] for client in mine])
        except BadReply as fault:
            faults |= dict.fromkeys(mine, fault)
    return faults


def check_fold(asked: Asked, folded: Sequence[Upload]) -> None:
    """Raise :class:`BadReply` if a mean is further from the model than its clients' distances.

    ||sum_i p_i u_i||^2 <= sum_i p_i ||u_i||^2 for all u_i and all shares p_i.
    """
    if asked.policy.folded is None:
        return
    weights = asked.policy.weights(folded)
    if not (total := sum(weights)):
        return
    distances2 = [upload.distance2 or 0.0 for upload in folded]
    most = math.sqrt(float(np.dot(weights, distances2)) / total)
    mean = np.asarray(folded[0].vector)
    rounding = ROUNDING * most + 1e-12 * norm(mean)
    if (size := norm(mean - asked.round.received)) > most + rounding:
        raise BadReply(
            f"its host's mean is {size:g} from the model, and the clients' root mean square"
            f" distance is said to be {most:g}"
        )


@dataclass
class Reader:
    """Reads the replies of phases; remembers only what it has warned of."""

    ledger: Ledger
    _warned: set[str] = field(default_factory=set, repr=False)
    _told: set[str] = field(default_factory=set, repr=False)
    """The errors of clients that the log has already."""

    def training(self, asked: Asked, replies: Iterable[Message]) -> Read:
        """Return the usable uploads of a training phase, ascending by client, and its metrics."""
        waited, means = time.monotonic() - asked.started, dict[int, Upload]()

        def taken(client: int, content: Content) -> tuple[Reply, Upload]:
            reply, upload = read(asked, client, content, means)
            return reply, self.ledger.check(reply, upload)

        sifted = sift(replies, asked, taken, partial(refused, asked), self._told)
        sifted, seconds = in_time(asked, sifted)
        good = [reply for reply, _ in sifted.good.values()]
        metrics, rows = self._numbers(asked, sifted, good, {})
        if doubts := asked.policy.identity.doubts(good, asked.policy.settings):
            self._log_once("unnamed", doubts)
        unread = self._unheeding(asked, good, sifted.unusable).get(DOWNLOAD, ())
        counts = sifted.counts
        return Read(
            replace(
                asked.round,
                traffic=counts["bytes-down"] + counts["bytes-up"],
                rejected=counts["clients-rejected"],
            ),
            [upload for _, upload in sifted.good.values()],
            metrics,
            rows,
            {reply.client: kind for reply in good if (kind := device_of(reply))},
            sifted.faults,
            {
                client: _explained(asked, reason, unread=client in unread)
                for client, reason in sifted.unusable.items()
            },
            busy_shares(sifted.busy, asked.policy.hosts, waited),
            seconds,
            sifted.took,
        )

    def evaluation(
        self,
        asked: Asked,
        replies: Iterable[Message],
        rows: Mapping[int, Mapping[str, float]],
    ) -> Read:
        """Return the metrics of an evaluation: weighted means, and the spread over clients.

        ``rows`` are the clients' numbers so far.
        """

        def numbers(client: int, content: Content) -> Reply:
            return open_reply(client, asked.round.number, content, asked.policy.expected)

        sifted = sift(replies, asked, numbers, told=self._told)
        good = list(sifted.good.values())
        self._unheeding(asked, good, sifted.unusable)
        metrics, rows = self._numbers(asked, sifted, good, rows)
        return Read(asked.round, [], metrics, rows, {}, sifted.faults, sifted.unusable, {}, 0.0, {})

    def forget(self) -> None:
        """Warn again in the next run."""
        self._warned.discard("names")
        self._told.clear()

    def _numbers(
        self,
        asked: Asked,
        sifted: Sifted[Any],
        good: Sequence[Reply],
        known: Mapping[int, Mapping[str, float]],
    ) -> tuple[MetricRecord, dict[int, dict[str, float]]]:
        """Return the phase's metrics, and the ``known`` numbers of each client with its own.

        The metrics are summaries of the clients' numbers, and the counts of replies.
        """
        policy = asked.policy
        names = names_of(good, policy.called)
        own = {
            reply.client: renamed(
                {n: v for n, v in reply.numbers.items() if not isinstance(v, list)}, names
            )
            for reply in good
        }
        if taken := sorted(n for n, called in names.items() if called not in (n, f"eval-{n}")):
            self._log_once(
                "names", f"clients use names of the server's, and get others: {taken!r:.300}"
            )
        numbers: Mapping[str, Any] = {}
        if good and policy.aggregation is None:
            numbers = summary(good, names, own)
        elif good and policy.aggregation is not None:
            contents = [as_records(reply.content) for reply in good]
            theirs = policy.aggregation(contents, policy.expected.weighted_by)
            numbers = renamed(theirs, {name: policy.called(name) for name in theirs})
        counts = {f"{policy.phase}{name}": count for name, count in sifted.counts.items()}
        rows = {client: dict(row) for client, row in known.items()}
        for reply in good:
            row = rows.setdefault(reply.client, {})
            row |= {**own[reply.client], f"{policy.phase}samples": reply.num_examples}
        return MetricRecord({**numbers, **counts}), rows

    def _unheeding(
        self, asked: Asked, good: Sequence[Reply], unusable: Collection[int]
    ) -> dict[str, list[int]]:
        """Name once, for each key to heed, the clients that were told it and do not repeat it.

        ``unusable`` replies count where the client cannot read the model, if no client says that it
        does. Returns these clients by key.
        """
        silent: dict[str, list[int]] = {}
        for key, clients in asked.told.items():
            heeding = {reply.client for reply in good if key in reply.words}
            answered = {reply.client for reply in good}.union(
                unusable if key == DOWNLOAD and not heeding else ()
            )
            if told := sorted(answered.intersection(clients) - heeding):
                silent[key] = told
                line = (
                    f"no reply of {named(told)} repeats {key!r}, by which it would say that its"
                    f" client heeds it: {asked.policy.heeded[key]}; AnyAlgorithmClient behind"
                    " client_app heeds it"
                )
                self._log_once(key, line, INFO if key == CHECKSUMS else WARNING)
        return silent

    def _log_once(self, what: str, line: str, level: int = WARNING) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log(level, line)


def _explained(asked: Asked, reason: str, *, unread: bool) -> str:
    """Return why a reply is unusable; of a client that loads all arrays, what is needed.

    ``unread`` says that no client reads a model in bfloat16, whose type errors then name.
    """
    if unread and any(name in reason for name in ("void", SHORT.str[1:])):
        return f"{reason}; {UNREAD}"
    policy = asked.policy
    unknown = any(f"{vector}/" in reason for vector in policy.extra_vectors)
    return f"{policy.identity.needs}; {reason}" if unknown else reason
