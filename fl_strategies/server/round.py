"""One communication round, from requests to the next global model.

- ``nodes`` knows which clients are connected, by stable ids; a generator seeded with (seed, round)
  samples among them, so that a seed fixes who takes part;
- ``wire`` and ``replies`` decode and check each reply once; a bad reply is left out, with a line in
  the log;
- ``identity``, ``composition``, ``bounds`` and the ledger (``core.ledger``) share one protocol
  (``requests.Part``): they add to a request, check an upload, and settle after a successful round;
- a round with fewer than ``min_replies`` usable replies, or with a model that is not finite, is
  void: its result is thrown away, and model, server state and ledger stay as they were.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
)
from flwr.serverapp import Grid

from fl_strategies.core.clipping import norm
from fl_strategies.core.layout import Arrays, BufferMean, negative_variance
from fl_strategies.core.log import log
from fl_strategies.core.names import SKIPPED, in_evaluation, in_training
from fl_strategies.core.records import BadReply, Reply, Upload, Uploads
from fl_strategies.core.vectors import finite
from fl_strategies.messages.bounds import NormBound
from fl_strategies.messages.encoding import encoded
from fl_strategies.messages.folding import DISTANCE, ROUNDING, Fold, decode_fold
from fl_strategies.messages.wire import Content, decode_model, opened, upload_of
from fl_strategies.server.algorithm import State
from fl_strategies.server.options import MetricsAggregation
from fl_strategies.server.replies import (
    Asked,
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
from fl_strategies.server.requests import Requests
from fl_strategies.server.run import Result


class Round(Requests):
    """The part of a strategy that Flower's ``Strategy.start``, its wrappers and servers call."""

    @property
    def result(self) -> Result:
        """The record of the current or last call of ``start``."""
        return self.run.result

    def open(self, initial_arrays: ArrayRecord, num_rounds: int) -> None:
        """Begin a run with the initial model, and forget the result of the last run."""
        self.run.open(initial_arrays, num_rounds)
        self.layout = None
        self.read_model(initial_arrays)
        first = self.first_state(self.theta) if self.state is None else self.state
        self.state = self.begin(first, self.theta)
        self._said_taken = False
        self._told: set[str] = set()
        self.composition.opened = True

    # ---- training -----------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests to the clients sampled for this round."""
        if server_round == 1:
            self.composition.wrapped = False
            if not self.composition.opened:
                self.run.close()
                self.open(arrays, 0)
                self.composition.opened = False
                watched = bool(self.callbacks or self.checkpoints)
                self.composition.wrap(self.untrained, watched=watched)
        self.run.round = server_round
        self.read_model(arrays)
        self.composition.begin_round(config, self.theta)
        nodes = self.nodes.wait(grid, self.clients_needed)
        self.composition.check_hosts(self.nodes.hosts)
        self.state = self.meet(self.state, nodes)
        number = self.run.number
        chosen = self.choose(number, nodes)
        self.check_enough(len(chosen), "asked")
        return self.requests(number, arrays, config, nodes, chosen, MessageType.TRAIN)

    @property
    def clients_needed(self) -> int:
        """How many clients a round waits for.

        The first one after a resumption waits for ``min_replies``, if the run has had so many: some
        may be away, for as long as their nodes take to come back.
        """
        least, run, known = max(self.min_available_nodes, self.min_train_nodes), self.run, 0
        if run.round == run.first > 1:
            known = len(self.nodes.known)
        enough = bisect_left(range(known + 1), self.min_replies, key=self.asked_of)
        return max(least, enough) if enough <= known else least

    def check_enough(self, clients: int, how: str) -> None:
        """Raise ``ValueError`` if a call's first round has too few clients for ``min_replies``.

        In later rounds clients may have left for a while: then the round is skipped.
        """
        if self.run.round == self.run.first:
            self._check_replies(clients, how)

    def check_population(self, clients: int) -> None:
        """Raise ``ValueError`` if no run with so many clients, all connected, can succeed."""
        self.check_clients(clients)
        self._check_replies(self.asked_of(clients), f"that {self.algorithm} asks in a round")

    def _check_replies(self, clients: int, how: str) -> None:
        if clients < self.min_replies:
            raise ValueError(
                f"min_replies is {self.min_replies}, and the number of clients {how} is {clients}"
            )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next global model and the round's metrics; None if the round is skipped."""
        run, number = self.run, self.run.rounds_before + server_round
        waited = time.monotonic() - self._asked.started
        sifted = sift(replies, self._asked, self._taken, self.check_fold, self._told)
        self._folds.clear()
        good = [reply for reply, _ in sifted.good.values()]
        metrics = self._phase(sifted, good, self.train_metrics_aggr_fn, in_training)
        self.patience.settle(len(good), sifted.unusable, len(self.nodes.known))
        self.identity.warn(good, self.local)
        run.clients = by_client(good, "samples", in_training, {})
        run.devices |= {reply.client: kind for reply in good if (kind := device_of(reply))}
        taken = [upload for _, upload in sifted.good.values()]
        uploads = Uploads(taken, number, self.population, self.asked)
        void, arrays, before = self._void_for(uploads), None, self.state
        if not void:
            model, state = self._next_model(uploads)
            void = self._unusable(model)
        if void:
            self.say(number, f"is skipped: {void}; model and state unchanged")
            metrics[SKIPPED] = 1
        else:
            self.state = state
            arrays = ArrayRecord({name: encoded(array) for name, array in model.items()})
            for part in self.parts:
                part.settle(taken)
            self._tell_shares(uploads, metrics)
        self.state, further = self.end_round(before, self.state, uploads, metrics)
        seconds = time.monotonic() - self._asked.started
        hosts = busy_shares(sifted.busy, self.nodes.hosts, waited)
        metrics.update({**hosts, **further, "seconds": seconds})
        self.result.train_metrics_clientapp[number] = metrics
        return arrays, metrics

    def _taken(self, client: int, content: Content) -> tuple[Reply, Upload]:
        """Return a reply and its upload, completed by what is booked of its client.

        Raises :class:`BadReply` for a reply that cannot be used.
        """
        reply, upload = self.read(client, content)
        return reply, self.accept(self.ledger.check(reply, upload))

    def read(self, client: int, content: Content) -> tuple[Reply, Upload]:
        """Return a reply and its upload; raise :class:`BadReply` if it breaks a bound."""
        assert self.layout is not None
        assert self._wire is not None
        layout, wire = self.layout, self._wire
        number = self._asked.rounds.get(client, self.run.number)
        fold, key = getattr(content, "fold", None), self.weighted_by_key
        bounds = dict(self.scalar_bounds)
        if fold is not None and self.folds_distances:
            most = math.inf if self.clipping_norm is None else self.clipping_norm
            bounds[DISTANCE] = 0.0, (most * (1.0 + ROUNDING)) ** 2
        reply = opened(
            client,
            number,
            content,
            key,
            len(wire.shapes),
            max_samples=self.max_samples,
            bounds=bounds,
            admit=self.identity.admit,
        )
        if fold is not None:
            return self._folded(reply, fold)
        if len(content.array_records) != 1:
            raise BadReply(f"{len(content.array_records)} ArrayRecords, expected one")
        arrays = decode_model(next(iter(content.array_records.values())), wire)
        reply = replace(reply, arrays=arrays)
        upload = upload_of(reply, layout, self.beside)
        for part in self._checks:
            upload = part.check(reply, upload)
        return reply, upload

    def _folded(self, reply: Reply, fold: Fold) -> tuple[Reply, Upload]:
        """Return a folded client's reply and upload, which is its host's mean.

        The mean is checked once. Raises :class:`BadReply` for a mean that cannot be right.
        """
        assert self.layout is not None
        assert self._wire is not None
        if (mean := self._folds.get(id(fold))) is None:
            arrays = decode_fold(fold, self._wire)
            mean = upload_of(replace(reply, arrays=arrays), self.layout, self.beside)
            if (bound := self.clipping_norm) is not None:
                within = bound * (1.0 + ROUNDING)
                mean = NormBound(within, self.reference, self.books_changes, self._model).check(
                    reply, mean
                )
            self._folds[id(fold)] = mean
        numbers = dict(reply.numbers)
        distance2 = numbers.pop(DISTANCE) if self.folds_distances else None
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
        weights = [self.weight(upload) for _, upload in folded]
        if not self.folds_distances or not (total := sum(weights)):
            return
        distances2 = [upload.distance2 or 0.0 for _, upload in folded]
        most = math.sqrt(float(np.dot(weights, distances2)) / total)
        mean = np.asarray(folded[0][1].vector)
        rounding = ROUNDING * most + 1e-12 * norm(mean)
        if (size := norm(mean - self.theta)) > most + rounding:
            raise BadReply(
                f"its host's mean is {size:g} from the model, and the clients' root mean square"
                f" distance is said to be {most:g}"
            )

    def _void_for(self, uploads: Uploads) -> str:
        """Return why the round is skipped, or "" if it is not."""
        if len(uploads) < (needed := self.replies_needed()):
            return f"{len(uploads)} usable replies, at least {needed} needed"
        if self.faults and self.composition.exact:
            return (
                f"{len(self.faults)} unusable replies cannot be taken out of a masked sum, nor the"
                " noise of a wrapper be made for fewer"
            )
        return ""

    def _next_model(self, uploads: Uploads) -> tuple[Arrays, State]:
        """Return the next global model and server state."""
        assert self.layout is not None
        merged = BufferMean()
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow is found just below
            for upload in uploads:
                merged.add(upload.buffers, upload.num_examples)
            vector, state = self.aggregate(self.state, self.theta, uploads)
            return self.layout.unpack(np.asarray(vector), merged.value()), state

    def _unusable(self, model: Arrays) -> str:
        """Return why nobody can use the aggregated ``model``, or "" if clients can."""
        assert self.layout is not None
        if not finite(model.values()):
            return "the aggregated model is not finite"
        wrong = negative_variance(model, self.layout.buffers)
        return f"the aggregated model cannot be used: {wrong}" if wrong else ""

    def _tell_shares(self, uploads: Uploads, metrics: MetricRecord) -> None:
        """Note each client's share of the samples and of the next global model."""
        weights = {upload.client: self.weight(upload) for upload in uploads}
        rows = self.run.clients
        total, samples = sum(weights.values()), sum(row["samples"] for row in rows.values())
        for client, row in rows.items():
            row["weight-share"] = weights[client] / total if total else 1 / len(uploads)
            row["data-share"] = row["samples"] / samples
        by_size = sorted(rows.values(), key=lambda row: row["samples"])
        if unequal := self.composition.unequal([row["weight-share"] for row in by_size]):
            self.say(uploads.round, unequal)
        for name in ("weight-share", "data-share"):
            metrics[f"{name}-smallest"] = by_size[0][name]
            metrics[f"{name}-largest"] = by_size[-1][name]

    def say(self, server_round: int, what: str) -> None:
        """Warn of something in a round."""
        log(WARNING, "round %d %s", server_round, what)

    # ---- evaluation ---------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests to the clients sampled to evaluate; none if the fraction is 0."""
        if self.fraction_evaluate == 0.0:
            self._asked = Asked((), 0, time.monotonic())
            return []
        nodes = self.nodes.wait(grid, max(self.min_available_nodes, self.min_evaluate_nodes))
        number = self.run.rounds_before + server_round
        chosen = self.sample(
            "evaluate", number, nodes, self.fraction_evaluate, self.min_evaluate_nodes
        )
        return self.requests(number, arrays, config, nodes, chosen, MessageType.EVALUATE)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the clients' evaluation: weighted means, and the variation between clients."""
        if not self._asked.clients:
            return None
        assert self._wire is not None
        key, arrays = self.weighted_by_key, len(self._wire.shapes)
        number = self.run.rounds_before + server_round
        sifted = sift(
            replies,
            self._asked,
            lambda c, content: opened(
                c, number, content, key, arrays, max_samples=self.max_samples
            ),
            told=self._told,
        )
        good = list(sifted.good.values())
        aggregation = self.evaluate_metrics_aggr_fn
        metrics = self._phase(sifted, good, aggregation, in_evaluation, "eval-")
        self.run.clients = by_client(good, "eval-samples", in_evaluation, self.run.clients)
        self.result.evaluate_metrics_clientapp[number] = metrics
        return metrics

    # ---- both ---------------------------------------------------------------------------------

    def _phase(
        self,
        sifted: Sifted[Any],
        good: Sequence[Reply],
        aggregation: MetricsAggregation | None,
        called: Naming,
        phase: str = "",
    ) -> MetricRecord:
        """Return the phase's numbers: those of the clients, and the counts of replies."""
        self.faults = sifted.faults
        if not self._said_taken and (taken := taken_names(good, called)):
            self._said_taken = True
            log(WARNING, "clients use names of the server's, and get others: %.300r", taken)
        found: Mapping[str, Any] = {}
        if good and aggregation is None:
            found = summary(good, called)
        elif good and aggregation is not None:
            contents = [as_records(reply.content) for reply in good]
            found = renamed(aggregation(contents, self.weighted_by_key), called)
        return MetricRecord({**found, **{f"{phase}{n}": v for n, v in sifted.counts.items()}})
