"""A run so far: its id, its rounds, its numbers, and their part of a checkpoint."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from logging import INFO, WARNING
from typing import Any

from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result as FlowerResult

from fl_strategies.core.ledger import Ledger
from fl_strategies.core.log import log
from fl_strategies.core.metric_names import FOREIGN, SERVER, SKIPPED
from fl_strategies.core.reasons import named
from fl_strategies.core.records import Round
from fl_strategies.core.schedules import plain, shown
from fl_strategies.server.asked import Asked
from fl_strategies.server.callbacks import Callback, RoundInfo
from fl_strategies.server.checkpoints import Checkpoint, Checkpoints, can_hold
from fl_strategies.server.patience import Patience
from fl_strategies.server.progress import round_line
from fl_strategies.server.replies import one_line
from fl_strategies.server.settling import Roles


class Result(FlowerResult):
    """Flower's ``Result``, which also says which rounds changed nothing.

    The keys of its mappings are the rounds that the log prints, and ``print`` shows the skipped
    rounds first.
    """

    @property
    def skipped(self) -> list[int]:
        """The rounds after which the model was as before: too few replies could be used."""
        rounds = self.train_metrics_clientapp.items()
        return [number for number, metrics in rounds if SKIPPED in metrics]

    def __repr__(self) -> str:
        """Return Flower's text, after a line about skipped rounds if there are any."""
        rounds, skipped, text = self.train_metrics_clientapp, self.skipped, super().__repr__()
        if not skipped:
            return text
        end = ": the model is as it was" if len(skipped) == len(rounds) else ""
        return f"Skipped: {named(skipped, 'round')} of {len(rounds)}{end}\n\n{text}"


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
    tested: set[str] = field(default_factory=set)
    """Names of the metrics that the server's own tests have reported."""
    faults: Mapping[int | None, str] = field(default_factory=dict)
    """The faults of the last phase's unusable replies, by client."""
    stopped: bool = False
    """Whether a callback had ended the run when the checkpoint was made that it continues from."""
    known: set[int] = field(default_factory=set)
    """The clients ever connected, of that checkpoint."""
    roles: Roles | None = None
    """The roles of the model's arrays, once they are settled."""
    asked: Asked = field(default_factory=lambda: Asked(Round()))
    """Who was asked last, between Flower's hooks that configure and that aggregate."""
    opened: bool = False
    """Whether the strategy's ``start`` or ``open``, not a wrapper, began the run."""

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
        """Begin a call: forget the result of the last."""
        self.num_rounds, self.result, self.tested = num_rounds, Result(arrays=arrays), set()
        self.opened = True

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
        self, arrays: ArrayRecord, callbacks: Sequence[Callback]
    ) -> tuple[bool, list[Exception]]:
        """Log the round and call the callbacks; return whether one ends the run, and errors."""
        self.result.arrays = arrays
        metrics = self.metrics(self.number)
        line = round_line(self.number, self.last, metrics)
        log(INFO, line, extra={"round_line": True})
        info = RoundInfo(
            self.number, self.last, arrays, metrics, self.clients, frozenset(self.tested)
        )
        stopped, errors = False, list[Exception]()
        for callback in callbacks:
            try:
                stopped |= plain(callback(info)) is True
            except Exception as error:
                errors.append(error)
        for other in errors[1:]:
            log(WARNING, "another callback raised %s", one_line(f"{type(other).__name__}: {other}"))
        return stopped, errors

    # ---- checkpoints --------------------------------------------------------------------------

    def checkpoint(
        self,
        arrays: ArrayRecord,
        settings: Mapping[str, str],
        states: Mapping[str, Any],
        ledger: Ledger,
        known: Iterable[int],
        *,
        stopped: bool,
    ) -> Checkpoint:
        """Return the checkpoint after the current round, ``arrays`` being what trains next."""
        run = {
            "settings": settings,
            "rounds-before": self.rounds_before,
            "round": self.round,
            "run-id": self.id,
            "stopped": stopped,
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
            f"{name} was {before.get(name)!s:.60}, is {settings.get(name)!s:.60}"
            for name in {**settings, **before}
            if before.get(name) != settings.get(name)
        ]:
            told = "; ".join(changes[:3])
            raise ValueError(f"{where} cannot be resumed with other settings: {told}")
        after = {name: restored(state, last.states[name], where) for name, state in states.items()}
        ledger.restore(last.ledger)
        self.id, self.devices = saved["run-id"], dict(saved["devices"])
        self.rounds_before, self.round = saved["rounds-before"], saved["round"]
        self.known, self.stopped = set(saved["clients"]), bool(saved["stopped"])
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


def fields_of(state: Any) -> dict[str, Any]:
    """Return a server state's fields by name; the state None has none."""
    if state is None:
        return {}
    if is_dataclass(state):
        return {f.name: getattr(state, f.name) for f in fields(state)}
    found: dict[str, Any] = state._asdict()
    return found


def check_state(hook: str, state: Any) -> None:
    """Raise ``TypeError`` unless a checkpoint can hold the ``state`` that ``hook`` returned."""
    if not (state is None or is_dataclass(state) or hasattr(state, "_asdict")):
        must = f"{hook} must return a state that is a named tuple, a frozen dataclass or None"
        raise TypeError(f"{must}, got {shown(state)}")
    for name, value in fields_of(state).items():
        if not can_hold(value):
            must = f"{hook} must return a state of numbers, texts, NumPy arrays, lists and dicts"
            raise TypeError(f"{must}, got {shown(value)} as {name}")


def restored(state: Any, saved: Mapping[str, Any], where: object) -> Any:
    """Return a record like ``state`` with the fields that a checkpoint ``saved``.

    Raises ``ValueError``, which names the file ``where``, if the fields are another record's.
    """
    ours = fields_of(state)
    if ours.keys() != saved.keys():
        raise ValueError(
            f"{where} holds {sorted(saved)} of the server, and this version keeps {sorted(ours)}"
        )
    return state if state is None else type(state)(**saved)
