"""A run so far: its id, its rounds, its numbers, and their part of a checkpoint."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result as FlowerResult

from fl_strategies.core.last_metrics import LastMetrics
from fl_strategies.core.ledger import Ledger
from fl_strategies.core.log import log
from fl_strategies.core.metric_names import FOREIGN, SERVER, SKIPPED, SPREAD
from fl_strategies.core.reasons import NOT_FINITE, named
from fl_strategies.core.schedules import plain
from fl_strategies.server.asked import Asked
from fl_strategies.server.callbacks import Callback, RoundInfo
from fl_strategies.server.checkpoints import Checkpoint, Checkpoints, fields_of, restored
from fl_strategies.server.replies import one_line
from fl_strategies.server.settling import Roles

LONGEST = 160
"""Of a longer line, the clients and seconds remain: a million clients with every fault."""
LONGEST_NAME = 20
"""Metrics with longer names are not shown."""

LAST = ("own-", "tuned-", "global-")
"""Metrics of these models are shown only where there are no others."""

WORDS = (("loss",), ("accuracy", "acc"))
"""The words in the names of losses, and of accuracies."""
_PLAIN = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)


@dataclass(repr=False)
class Result(FlowerResult):
    """Flower's ``Result``, which also says which rounds changed nothing, and what ended the run.

    The keys of its mappings are the rounds that the log prints, and ``print`` shows the skipped
    rounds first.
    """

    ended_by: str = ""
    """What ended the run before its last round: "should_stop", "max_epsilon", or the name of a
    callback; "" if nothing did."""

    @property
    def skipped(self) -> list[int]:
        """The rounds after which the model was as before: too few replies could be used."""
        rounds = self.train_metrics_clientapp.items()
        return [number for number, metrics in rounds if SKIPPED in metrics]

    def __repr__(self) -> str:
        """Return Flower's text, after a line about skipped rounds if there are any."""
        rounds, skipped, text = self.train_metrics_clientapp, self.skipped, super().__repr__()
        if skipped:
            end = ": the model is as it was" if len(skipped) == len(rounds) else ""
            text = f"Skipped: {named(skipped, 'round')} of {len(rounds)}{end}\n\n{text}"
        if self.ended_by:
            text = f"Ended by {self.ended_by} after round {max(rounds, default=0)}\n\n{text}"
        return text


class NothingUsable(RuntimeError):
    """Several rounds in a row were skipped, with unusable replies; the text tells each cause once.

    ``diverged`` says that the only cause was numbers that are not finite.
    """

    def __init__(self, text: str, *, diverged: bool = False) -> None:
        super().__init__(text)
        self.diverged = diverged


class Patience:
    """Ends a run whose rounds are skipped, one after another, with unusable replies.

    The run ends after ``rounds`` training rounds in a row that were skipped and had unusable
    replies, if at least two clients answered in them (or the only client that exists). A round
    without such a reply does not count.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._in_a_row = 0
        self._used = 0
        self._causes: dict[str, tuple[str, set[int]]] = {}

    def settle(
        self, used: int, unusable: Mapping[int, str], clients: int, *, skipped: bool
    ) -> None:
        """Note a round; raise :class:`NothingUsable` if it was one too many.

        ``used`` replies were usable; ``clients`` is the number of clients ever connected.
        """
        if not skipped:
            self._in_a_row, self._used, self._causes = 0, 0, {}
        if not skipped or not unusable:
            return
        self._in_a_row += 1
        self._used = max(self._used, used)
        for client, reason in unusable.items():
            # texts of one cause may differ in their numbers from client to client
            self._causes.setdefault(re.sub(r"\d+", "#", reason), (reason, set()))[1].add(client)
        answered = len(self._who()) + self._used
        if self._in_a_row >= self.rounds and answered >= min(2, clients):
            told = "; ".join(
                f"{named(sorted(who))}: {reason}" for reason, who in self._causes.values()
            )
            rounds = f"{self._in_a_row} rounds in a row"
            raise NothingUsable(
                f"{rounds} were skipped, with {self._used} usable replies at most: {told}"
                if self._used
                else f"no reply of {rounds} was usable: {told}",
                diverged=all(NOT_FINITE in reason for reason, _ in self._causes.values()),
            )

    def _who(self) -> set[int]:
        return {client for _, who in self._causes.values() for client in who}


@dataclass
class Run:
    """One run, which several calls of ``start`` may continue.

    ``round`` counts communication rounds in the current call, ``rounds_before`` those of earlier
    calls; ``devices`` holds, by client, the kind of device on which it last trained.
    """

    algorithm: str
    reports: tuple[str, ...]
    """Names of the algorithm's own metrics."""
    patience: Patience
    """Ends a run in which no reply can be used."""
    id: str = ""
    rounds_before: int = 0
    round: int = 0
    num_rounds: int = 0
    first: int = 1
    """The current call's first round; after a resumption that is not 1."""
    result: Result = field(default_factory=Result)
    devices: dict[int, str] = field(default_factory=dict)
    clients: dict[int, dict[str, float]] = field(default_factory=dict)
    """The numbers of each client in the current round."""
    last_metrics: LastMetrics = field(default_factory=LastMetrics)
    """What is known of each client that was ever asked to train."""
    tested: set[str] = field(default_factory=set)
    """Names of the metrics that the server's own tests have reported."""
    faults: Mapping[int | None, str] = field(default_factory=dict)
    """The faults of the last phase's unusable replies, by client."""
    known: set[int] = field(default_factory=set)
    """The clients ever connected, of that checkpoint."""
    roles: Roles | None = None
    """The roles of the model's arrays, once they are settled."""
    asked: Asked | None = None
    """Who was asked, between Flower's hooks that configure and that aggregate."""
    train_config: dict[str, Any] = field(default_factory=dict)
    """The ``train_config`` of the current call, as it was at its beginning."""
    opened: bool = False
    """Whether the strategy's ``start`` or ``open``, not a wrapper, began the run."""
    began: float = field(default_factory=time.monotonic)
    """When the current call began."""
    waited_since: float = field(default_factory=time.monotonic)
    """When the last round ended, or the current call began."""

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.algorithm}-{secrets.token_hex(8)}"

    @property
    def number(self) -> int:
        """The number 1, 2, ... of the current communication round, over all calls.

        Log, callbacks, results, requests, schedules and random streams have this one number.
        """
        return self.rounds_before + self.round

    @property
    def last(self) -> int:
        """The number of the current call's last round."""
        return self.rounds_before + self.num_rounds

    @property
    def numbers(self) -> range:
        """The numbers of the current call's rounds so far."""
        return range(self.rounds_before + 1, self.number + 1)

    def beginning(self, algorithm: str) -> str:
        """Return what a person reads when a call begins its rounds."""
        if self.round >= self.num_rounds:
            return f"{algorithm}: all {self.num_rounds} rounds of run {self.id} are done"
        return f"{algorithm}: {self.num_rounds} rounds, from round {self.number + 1}; run {self.id}"

    def open(self, arrays: ArrayRecord, num_rounds: int) -> None:
        """Begin a call: forget the result of the last, which ends here if it has not ended."""
        self.close()
        self.num_rounds, self.result, self.tested = num_rounds, Result(arrays=arrays), set()
        self.opened = True
        self.began = self.waited_since = time.monotonic()

    def close(self) -> None:
        """End a call."""
        self.rounds_before += self.round
        self.round, self.opened = 0, False

    # ---- a round's numbers --------------------------------------------------------------------

    def metrics(self, server_round: int) -> dict[str, float]:
        """Return the round's numbers; clients' and server's numbers have different names.

        The server's tests come first, then clients' evaluation, then their training.
        """
        tests = self.result.evaluate_metrics_serverapp
        for number in (self.rounds_before, server_round):
            self.tested |= tests.get(number, {}).keys()
        trained, evaluated, tested = (
            {n: v for n, v in phase.get(server_round, {}).items() if not isinstance(v, list)}
            for phase in self.phases
        )
        clients = {**evaluated, **trained}
        ours = SERVER.union(self.reports)
        own = {name: clients.pop(name) for name in list(clients) if name in ours}
        theirs = {f"{FOREIGN}{n}" if n in self.tested else n: v for n, v in clients.items()}
        return {**tested, **theirs, **own}

    @property
    def phases(self) -> list[dict[int, MetricRecord]]:
        """The numbers by round: clients' training and evaluation, and the server's tests."""
        return [
            self.result.train_metrics_clientapp,
            self.result.evaluate_metrics_clientapp,
            self.result.evaluate_metrics_serverapp,
        ]

    def tell(
        self,
        arrays: ArrayRecord,
        callbacks: Sequence[Callback],
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> list[Exception]:
        """Log the round, call the callbacks, note which one ends the run; return their errors."""
        self.result.arrays = arrays
        number, last, now = self.number, self.last, time.monotonic()
        metrics = self.metrics(number)
        seconds, self.waited_since = now - self.waited_since, now
        log(INFO, round_line(number, last, metrics, seconds), extra={"round_line": True})
        tested = frozenset(self.tested)
        info = RoundInfo(number, last, arrays, metrics, self.clients, tested, seconds)
        errors = list[Exception]()
        for callback in callbacks:
            try:
                if plain(callback(info)) is True:
                    self.result.ended_by = getattr(callback, "__name__", type(callback).__name__)
            except Exception as error:
                errors.append(error)
        try:
            if should_stop is not None and should_stop(number, self.result):
                self.result.ended_by = "should_stop"
        except Exception as error:
            errors.append(error)
        for other in errors[1:]:
            log(WARNING, "another callback raised %s", one_line(f"{type(other).__name__}: {other}"))
        return errors

    def ending(self) -> Iterator[str]:
        """Yield the lines about the whole call that a person reads at its end."""
        result = self.result
        by = f", ended by {result.ended_by}" if result.ended_by else ""
        count, seconds = self.round - self.first + 1, time.monotonic() - self.began
        yield f"{self.algorithm}: {count} rounds in {seconds:.1f} s{by}"
        rows = {number: self.metrics(number) for number in result.train_metrics_clientapp}
        yield from ending_lines(rows)

    def say_how_it_ended(self, others: Iterable[object]) -> None:
        """Log the result and the best round; have ``others`` say where models lie."""
        if (skipped := self.result.skipped) and skipped == [*self.numbers]:
            log(WARNING, "every round was skipped (%d): the model is as it was", len(skipped))
        for line in self.ending():
            log(INFO, line)
        for one in others:
            if run_ended := getattr(one, "run_ended", None):
                run_ended()

    # ---- checkpoints --------------------------------------------------------------------------

    def checkpoint(
        self,
        arrays: ArrayRecord,
        settings: Mapping[str, str],
        states: Mapping[str, Any],
        ledger: Ledger,
        known: Iterable[int],
    ) -> Checkpoint:
        """Return the checkpoint after the current round, ``arrays`` being what trains next."""
        run = {
            "settings": settings,
            "rounds-before": self.rounds_before,
            "round": self.round,
            "run-id": self.id,
            "ended-by": self.result.ended_by,
            "clients": sorted(known),
            "devices": sorted(self.devices.items()),
            "roles": self.roles._asdict() if self.roles else {},
            "metrics": self.metrics(self.number),
            "history": [
                [[number, dict(record)] for number, record in phase.items()]
                for phase in self.phases
            ],
        }
        trained = {name: array.numpy() for name, array in arrays.items()}
        kept = {name: fields_of(state) for name, state in states.items()}
        return Checkpoint(trained, kept, ledger.record, run)

    def take(self, checkpoints: Checkpoints | None, *, resume: bool) -> Checkpoint | None:
        """Lock the checkpoints, if any; return the last, None if the run begins anew.

        The run takes over the roles of the last one's arrays.
        """
        if checkpoints is None:
            if resume:
                raise ValueError("resume needs checkpoints: give the strategy some")
            return None
        before = checkpoints.take()
        last = checkpoints.last() if resume else None
        if last is not None:
            self.roles = Roles.saved(last.run["roles"])
            return last
        # killed before its first, clients may have states of it
        if resume and before.rpartition("-")[0] == self.algorithm:
            self.id = before
        self.claim(checkpoints, before)
        return None

    def resume(
        self,
        last: Checkpoint,
        checkpoints: Checkpoints | None,
        settings: Mapping[str, str],
        states: Mapping[str, Any],
        ledger: Ledger,
    ) -> dict[str, Any]:
        """Restore the run and the ledger from the ``last`` checkpoint, and return its states.

        ``settings`` are what checkpoint and run must have in common, ``states`` are records like
        those to restore.
        """
        assert checkpoints is not None
        where, saved = checkpoints.directory, last.run
        before = saved["settings"]
        if changes := [
            f"{name} was {before.get(name, 'not set')!s:.60}, is"
            f" {settings.get(name, 'not set')!s:.60}"
            for name in {**settings, **before}
            if before.get(name) != settings.get(name)
        ]:
            told = "; ".join(changes[:3])
            raise ValueError(f"{where} cannot be resumed with other settings: {told}")
        after = {name: restored(state, last.states[name], where) for name, state in states.items()}
        ledger.restore(last.ledger)
        self.id, self.devices = saved["run-id"], dict(saved["devices"])
        self.rounds_before, self.round = saved["rounds-before"], saved["round"]
        self.known, self.result.ended_by = set(saved["clients"]), saved["ended-by"]
        self.result.arrays = ArrayRecord({n: Array(array) for n, array in last.model.items()})
        for phase, rows in zip(self.phases, saved["history"], strict=True):
            phase.update({number: MetricRecord(row) for number, row in rows})
        checkpoints.sign(self.id)
        return after

    def claim(self, checkpoints: Checkpoints, before: str) -> None:
        """Sign the locked directory, which belonged to run ``before``, for this run."""
        if not self.rounds_before:
            checkpoints.begin()
        elif before != self.id:
            raise ValueError(f"{checkpoints.directory} is now of run {before}, not {self.id}")
        checkpoints.sign(self.id)


# ---- what a person reads -------------------------------------------------------------------------


def round_line(number: int, of: int, metrics: Mapping[str, float], seconds: float) -> str:
    """Return round ``number`` of ``of``, which took ``seconds``, in at most 160 characters.

    Loss and accuracy are the first of ``metrics`` with this word in their name; those of ``LAST``
    come last, so that both are of one model where it has both. Of the clients that
    were asked, the line counts those that were used, and what happened to the others: lost (no
    reply), failed (an error), rejected (a reply that cannot be used).

    Examples
    --------
    >>> counts = {"clients-asked": 10, "clients-used": 8, "clients-lost": 2}
    >>> round_line(3, 30, {"test-loss": 0.51, "test-accuracy": 0.8, **counts}, 1.26)
    'round 3/30: test-loss 0.5100, test-accuracy 0.8000, 8 of 10 clients (2 lost), 1.3 s'
    """
    parts = [f"{name} {_digits(metrics[name])}" for name in _loss_and_accuracy(metrics)]
    place = len(parts)
    parts += [_clients(metrics, ""), _clients(metrics, "eval-"), f"{seconds:.1f} s"]
    line = f"round {number}/{of}: {', '.join(filter(None, parts))}"
    if len(line) <= LONGEST:
        return line
    return f"round {number}/{of}: {', '.join([parts[place], parts[-1]])}"


def ending_lines(rows: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
    """Yield the result of a run and its best round, from the metrics of its rounds.

    The best round has the largest accuracy, or else the smallest loss, of those that
    :func:`round_line` shows in the round with the most metrics; none of training counts.

    Examples
    --------
    >>> list(ending_lines({1: {"eval_acc": 0.8}, 2: {"eval_acc": 0.75}}))
    ['  result, round 2: eval_acc 0.7500', '  best, round 1: eval_acc 0.8000']
    """
    for number, row in [*rows.items()][-1:]:
        shown = [f"{name} {_digits(row[name])}" for name in _loss_and_accuracy(row)]
        if shown:
            yield f"  result, round {number}: {', '.join(shown)}"
    tests = {n: 0.0 for n in max(rows.values(), key=len, default=()) if not n.startswith("train")}
    for found in reversed(_loss_and_accuracy(tests)):
        sign = -1.0 if "loss" in _words(found) else 1.0
        values = {n: row[found] for n, row in rows.items() if found in row}
        if rated := {n: sign * value for n, value in values.items() if not math.isnan(value)}:
            best = max(rated, key=lambda number: rated[number])
            yield f"  best, round {best}: {found} {_digits(values[best])}"
            return


def _loss_and_accuracy(metrics: Mapping[str, float]) -> list[str]:
    plain = [
        name
        for name in metrics
        if len(name) <= LONGEST_NAME and _PLAIN.fullmatch(name) and not name.endswith(SPREAD)
    ]
    plain.sort(key=lambda name: name.startswith(LAST))
    found = [
        next((name for name in plain if not _words(name).isdisjoint(words)), "") for words in WORDS
    ]
    return [name for name in found if name]


def _words(name: str) -> set[str]:
    return {*re.split("[-_.]", name.lower())}


def _digits(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def _clients(metrics: Mapping[str, float], phase: str) -> str:
    """Return the counts of a phase; of an evaluation without a fault nothing is said."""
    asked, used, lost, failed, rejected = (
        int(metrics.get(f"{phase}clients-{what}", 0))
        for what in ("asked", "used", "lost", "failed", "rejected")
    )
    counts = {"lost": lost, "failed": failed, "rejected": rejected - failed}
    faults = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    if phase:
        return f"evaluation {used} of {asked} ({faults})" if faults else ""
    return f"{used} of {asked} clients" + (f" ({faults})" if faults else "")
