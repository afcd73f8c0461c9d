"""Reading: from a phase's replies to usable uploads and the phase's metrics.

Each reply is decoded and checked once: wire > identity > intact > clipped > bound > ledger > rule.
A bad reply is not used, and the log says why.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from logging import WARNING
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message, MetricRecord

from fl_strategies.core.clipping import norm
from fl_strategies.core.layout import Arrays
from fl_strategies.core.ledger import Ledger
from fl_strategies.core.log import log
from fl_strategies.core.metric_names import in_evaluation, in_training
from fl_strategies.core.records import BadReply, Reply, Round, Upload
from fl_strategies.messages.bounds import NormBound
from fl_strategies.messages.codes import CODEC, decompressed
from fl_strategies.messages.folding import DISTANCE, ROUNDING, Fold, decode_fold
from fl_strategies.messages.identity import Identity
from fl_strategies.messages.wire import Content, decode_model, decoded, open_reply, upload_of
from fl_strategies.parts.compression import Compression
from fl_strategies.server.algorithm import Algorithm, State
from fl_strategies.server.asked import Asked
from fl_strategies.server.composition import Caller, check_clipped, check_intact
from fl_strategies.server.options import MetricsAggregation
from fl_strategies.server.replies import (
    Naming,
    Sifted,
    as_records,
    busy_shares,
    by_client,
    device_of,
    renamed,
    sift,
    summary,
    taken_names,
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
    seconds: float = 0.0
    """How long the phase lasted by the virtual clock."""


@dataclass
class Reader:
    """Reads replies for an algorithm; remembers only what it has warned of."""

    algorithm: Algorithm
    ledger: Ledger
    _warned: set[str] = field(default_factory=set, repr=False)
    _told: set[str] = field(default_factory=set, repr=False)
    """The errors of clients that the log has already."""

    def training(
        self,
        state: State,
        asked: Asked,
        replies: Iterable[Message],
        caller: Caller,
        hosts: Iterable[int] = (),
    ) -> Read:
        """Return the usable uploads of a training phase, ascending by client, and its metrics."""
        waited = time.monotonic() - asked.started
        phase = Phase(self, state, asked, caller)
        sifted = sift(replies, asked, phase.taken, phase.check, phase.check_fold, self._told)
        sifted, seconds = in_time(self.algorithm, asked, sifted)
        good = [reply for reply, _ in sifted.good.values()]
        metrics = self._metrics(
            sifted, good, self.algorithm.train_metrics_aggr_fn, self._in_training
        )
        if doubts := phase.identity.doubts(good, self.algorithm.local or {}):
            self._warn_once("unnamed", doubts)
        counts = sifted.counts
        return Read(
            replace(asked.round, traffic=counts["bytes-down"] + counts["bytes-up"]),
            [upload for _, upload in sifted.good.values()],
            metrics,
            by_client(good, "samples", self._in_training, {}),
            {reply.client: kind for reply in good if (kind := device_of(reply))},
            sifted.faults,
            {client: phase.explained(reason) for client, reason in sifted.unusable.items()},
            busy_shares(sifted.busy, hosts, waited),
            seconds,
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
        assert asked.wire is not None
        read = partial(
            open_reply,
            server_round=asked.round.number,
            weighted_by=self.algorithm.weighted_by_key,
            arrays=len(asked.wire.shapes),
            max_samples=self.algorithm.max_samples,
        )
        sifted = sift(replies, asked, lambda c, content: read(c, content=content), told=self._told)
        good = list(sifted.good.values())
        aggregation = self.algorithm.evaluate_metrics_aggr_fn
        metrics = self._metrics(sifted, good, aggregation, in_evaluation, "eval-")
        rows = by_client(good, "eval-samples", in_evaluation, rows)
        faults, unusable = sifted.faults, sifted.unusable
        return Read(asked.round, [], metrics, rows, {}, faults, unusable, {})

    def reply(
        self, state: State, asked: Asked, caller: Caller, client: int, content: Content
    ) -> Reply:
        """Return a reply, and record nothing; raise :class:`BadReply` if it cannot be used."""
        return Phase(self, state, asked, caller).read(client, content)[0]

    @property
    def _in_training(self) -> Naming:
        return partial(in_training, reports=self.algorithm.reports)

    def _metrics(
        self,
        sifted: Sifted[Any],
        good: Sequence[Reply],
        aggregation: MetricsAggregation | None,
        called: Naming,
        phase: str = "",
    ) -> MetricRecord:
        """Return the phase's numbers: those of the clients, and the counts of replies."""
        if taken := taken_names(good, called):
            self._warn_once(
                "names", f"clients use names of the server's, and get others: {taken!r:.300}"
            )
        numbers: Mapping[str, Any] = {}
        if good and aggregation is None:
            numbers = summary(good, called)
        elif good and aggregation is not None:
            contents = [as_records(reply.content) for reply in good]
            numbers = renamed(aggregation(contents, self.algorithm.weighted_by_key), called)
        return MetricRecord({**numbers, **{f"{phase}{n}": v for n, v in sifted.counts.items()}})

    def forget(self) -> None:
        """Warn again in the next run."""
        self._warned.discard("names")
        self._told.clear()

    def _warn_once(self, what: str, line: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log(WARNING, line)


class Phase:
    """The checks of one training phase's replies."""

    def __init__(self, reader: Reader, state: State, asked: Asked, caller: Caller) -> None:
        algorithm, layout, wire = reader.algorithm, asked.round.layout, asked.wire
        assert layout is not None
        assert wire is not None
        self.algorithm, self.ledger, self.state = algorithm, reader.ledger, state
        self.asked, self.caller, self.layout, self.wire = asked, caller, layout, wire
        self.identity = Identity(
            type(algorithm).__name__, algorithm.runs or algorithm.algorithm, algorithm.trust, layout
        )
        self._folds: dict[int, Upload] = {}  # the means that were checked, by id(Fold)

    def taken(self, client: int, content: Content) -> tuple[Reply, Upload]:
        """Return a reply and its upload, completed by what is recorded of its client.

        Raises :class:`BadReply` for a reply that cannot be used.
        """
        reply, upload = self.read(client, content)
        return reply, self.ledger.check(reply, upload)

    def check(self, good: Sequence[tuple[Reply, Upload]]) -> Mapping[int, str]:
        """Return which uploads the rule cannot use, and why."""
        return self.algorithm.unusable(self.state, self.asked.round, [upload for _, upload in good])

    def explained(self, reason: str) -> str:
        """Return why a reply is unusable; of a client that loads all arrays, what is needed."""
        unknown = any(f"{vector}/" in reason for vector in self.algorithm.extra_vectors)
        return f"{self.identity.needs}; {reason}" if unknown else reason

    def read(self, client: int, content: Content) -> tuple[Reply, Upload]:
        """Return a reply and its upload; raise :class:`BadReply` if it breaks a bound."""
        algorithm, asked = self.algorithm, self.asked.of(client)
        fold = getattr(content, "fold", None)
        bounds = dict(algorithm.scalar_bounds)
        if fold is not None and algorithm.sends_distances:
            most = math.inf if algorithm.clipping_norm is None else algorithm.clipping_norm
            bounds[DISTANCE] = 0.0, (most * (1.0 + ROUNDING)) ** 2
        reply = open_reply(
            client,
            asked.round.number,
            content,
            algorithm.weighted_by_key,
            len(self.wire.shapes),
            max_samples=algorithm.max_samples,
            bounds=bounds,
            admit=self.identity.admit,
        )
        if fold is not None:
            return self._folded(reply, fold)
        if len(content.array_records) != 1:
            raise BadReply(f"{len(content.array_records)} ArrayRecords, expected one")
        sent = next(iter(content.array_records.values()))
        codec = algorithm.compression if CODEC in reply.words else None
        arrays = decoded(sent) if codec else decode_model(sent, self.wire)
        intact = self.caller.intact(algorithm.mean_of, self.wire)
        check_intact(replace(reply, arrays=arrays), self.identity.strategy, intact, self.wire)
        if codec:
            arrays = decode_model(self._decompressed(codec, reply, arrays, asked.model), self.wire)
        reply = replace(reply, arrays=arrays)
        check_clipped(reply, self.caller, asked.bound, asked.round)
        upload = upload_of(reply, self.layout, algorithm.extra_vectors)
        if algorithm.clipping_norm is not None:
            upload = self._bound(algorithm.clipping_norm, asked).check(upload)
        received = None if asked is self.asked else asked.round.received
        return reply, upload._replace(received=received)

    def _decompressed(
        self, codec: Compression, reply: Reply, codes: Arrays, model: Arrays
    ) -> Arrays:
        if reply.words[CODEC] != str(codec):
            raise BadReply(f"its codec is {reply.words[CODEC]!r}, the one asked for {str(codec)!r}")
        start = {} if self.algorithm.uploads_changes else model
        return decompressed(codes, self.layout, self.algorithm.extra_vectors, codec.decode, start)

    def _bound(self, bound: float, asked: Asked) -> NormBound:
        reference = partial(self.algorithm.reference, self.state, asked.round)
        return NormBound(bound, reference, self.algorithm.accumulates_changes, asked.model)

    def _folded(self, reply: Reply, fold: Fold) -> tuple[Reply, Upload]:
        """Return a folded client's reply and upload, which is its host's mean.

        The mean is checked once. Raises :class:`BadReply` for a mean that cannot be right.
        """
        if (mean := self._folds.get(id(fold))) is None:
            arrays = decode_fold(fold, self.wire)
            folded = replace(reply, arrays=arrays)
            mean = upload_of(folded, self.layout, self.algorithm.extra_vectors)
            if (bound := self.algorithm.clipping_norm) is not None:
                mean = self._bound(bound * (1.0 + ROUNDING), self.asked).check(mean)
            self._folds[id(fold)] = mean
        numbers = dict(reply.numbers)
        distance2 = numbers.pop(DISTANCE) if self.algorithm.sends_distances else None
        return replace(reply, numbers=numbers), mean._replace(
            client=reply.client,
            num_examples=reply.num_examples,
            scalars=numbers,
            round=reply.round,
            distance2=distance2,
        )

    def check_fold(self, folded: Sequence[tuple[Reply, Upload]]) -> None:
        """Raise :class:`BadReply` if a mean is further from the model than its clients' distances.

        ||sum_i p_i u_i||^2 <= sum_i p_i ||u_i||^2 for all u_i and all shares p_i.
        """
        if not self.algorithm.sends_distances:
            return
        weights = self.algorithm.weights_of(self.asked.round, (upload for _, upload in folded))
        if not (total := sum(weights)):
            return
        distances2 = [upload.distance2 or 0.0 for _, upload in folded]
        most = math.sqrt(float(np.dot(weights, distances2)) / total)
        mean = np.asarray(folded[0][1].vector)
        rounding = ROUNDING * most + 1e-12 * norm(mean)
        if (size := norm(mean - self.asked.round.received)) > most + rounding:
            raise BadReply(
                f"its host's mean is {size:g} from the model, and the clients' root mean square"
                f" distance is said to be {most:g}"
            )
