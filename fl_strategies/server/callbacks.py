"""Callbacks for the end of a round.

Any function of a :class:`RoundInfo` is a callback. If it returns ``True``, the run stops after this
round. If it raises, the run also ends, after the other callbacks have seen the round and the
checkpoint is written; a resumed run continues with the next round. When a run is resumed, a
callback with a method ``recall(rows)`` gets the metrics of the earlier rounds, by round. A method
``run_ended()`` is called at the end of a run that no error ended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from pathlib import Path
from typing import TypeAlias

from flwr.app import ArrayRecord
from safetensors.numpy import save

from fl_strategies.core.files import DamagedFile, naming, read_lines, write_atomically
from fl_strategies.core.log import log
from fl_strategies.core.metric_names import SERVER, SPREAD
from fl_strategies.core.schedules import check, require
from fl_strategies.core.spelling import unknown


@dataclass(frozen=True)
class RoundInfo:
    """What a person may want to know at the end of a round.

    ``metrics`` holds the round's numbers: training (``train-loss`` ...), clients' evaluation
    (``eval-accuracy`` ...), the server's tests (``test-accuracy`` ...), bytes, clients and seconds.
    A client's metric under a name that is not the client's is called ``client-...`` (``names``).
    Lists are not among them: the result has their means.
    ``clients`` holds, by client id, the numbers of each used reply: ``samples``, ``data-share`` (of
    the round's samples) and ``weight-share`` (of the rule's weights, which are equal with a
    combining part) of clients that trained, and what they measured. ``tested`` holds the names of
    the metrics that the server's tests have reported in the run so far, also if they reported none
    in this round. ``seconds`` have passed since the last round ended, or ``start`` was called:
    training, evaluation, tests, and in the first round what was done before it. The metric
    ``seconds`` is training alone.
    """

    server_round: int
    num_rounds: int
    arrays: ArrayRecord
    metrics: Mapping[str, float]
    clients: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    tested: frozenset[str] = frozenset()
    seconds: float = 0.0


LARGEST = 1e150
"""The largest size of a number in a file."""
Callback: TypeAlias = Callable[[RoundInfo], bool | None]
Rows: TypeAlias = Mapping[int, Mapping[str, float]]


def usual(kind: str, names: Collection[str]) -> str:
    """Return ``test-accuracy``, or else ``eval-accuracy``, if it is among ``names``; else "".

    ``kind`` is "accuracy" or "loss".
    """
    return next((name for name in (f"test-{kind}", f"eval-{kind}") if name in names), "")


class Watched:
    """The ``metric`` that ``who`` watches; None is :func:`usual` of this ``kind``.

    A metric may come late: a client may have no value of it, or the server may not test in each
    round. Raises ``ValueError`` for a metric that is no text, or an "accuracy" that is a loss.
    """

    def __init__(self, who: str, metric: str | None, kind: str) -> None:
        named = metric is None or isinstance(metric, str)
        require(named, "metric", "the name of a metric, or None", metric)
        if metric and kind == "accuracy" and metric.endswith("loss"):
            raise ValueError(f"{who}: the smaller {metric!r} is the better one: give smaller=True")
        self.who, self.kind, self.metric = who, kind, metric
        self.begin()

    def begin(self) -> None:
        """Begin another run."""
        self._came, self._seen = False, set[str]()

    def value(self, metrics: Mapping[str, float], tested: Collection[str] = ()) -> float | None:
        """Return the metric in a round; None if the round does not report it.

        ``tested`` names what the server's tests report in other rounds. A log line says which
        metrics there are if the first round has not got this one. Raises ``ValueError`` if no
        metric was named and a round has not got the usual one.
        """
        names = {*metrics, *tested}
        if self.metric is None and (found := usual(self.kind, names)):
            self.metric = found
            log(INFO, "%s watches %s", self.who, found)
        if self.metric is None and _listed(names):
            raise ValueError(
                f"{self.who} finds neither test-{self.kind} nor eval-{self.kind}: give metric=...;"
                f" there are {_listed(names)}"
            )
        value = None if self.metric is None else metrics.get(self.metric)
        if self.metric and not self._seen and self.metric not in names:
            said = unknown([self.metric], names)
            log(WARNING, "%s waits for %s; there are %s", self.who, said, _listed(names) or "none")
        self._seen |= names
        self._came |= value is not None and not math.isnan(value)
        return value

    def values(self, rows: Rows) -> Iterator[tuple[int, float | None]]:
        """Yield the round and the metric of earlier rounds."""
        tested = {name for row in rows.values() for name in row}
        for server_round, row in rows.items():
            yield server_round, self.value(row, tested)

    def came(self, otherwise: str) -> bool:
        """Return whether the metric was a number in any round; else the log says ``otherwise``."""
        if not self._came:
            told = "%s: no round reported %s, and %s; there are %s"
            called = unknown([self.metric or f"eval-{self.kind}"], self._seen - {self.metric or ""})
            log(WARNING, told, self.who, called, otherwise, _listed(self._seen) or "none")
        return self._came


def _listed(names: Collection[str]) -> str:
    """Return the names that a person may want to watch, as text; "" if there are none."""
    return ", ".join(n for n in sorted(names) if n not in SERVER and not n.endswith(SPREAD))


class _Lines:
    """A file of JSON lines; the first line that is written begins the file anew."""

    def __init__(self, path: Path) -> None:
        self.path, self._mode = Path(path), "w"
        if not self.path.parent.is_dir():
            raise ValueError(f"{self.path.parent} is no directory to write {self.path.name} in")

    def recall(self, rows: Rows) -> None:
        """Keep the lines of earlier rounds; raise :class:`DamagedFile` if one is damaged."""
        try:
            found = read_lines(self.path) if self.path.exists() else []
        except DamagedFile as fault:
            said = f"{fault}; the run continues without it if it is moved away"
            raise DamagedFile(said) from None
        before = [row for row in found if row["round"] <= max(rows, default=0)]
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in before).encode())
        self._mode = "a"

    def append(self, server_round: int, rows: Iterable[Mapping[str, float]]) -> None:
        """Write the round's rows to disk at once, in one piece."""
        lines = [
            json.dumps({"round": server_round, **{n: finite(v) for n, v in row.items()}}) + "\n"
            for row in rows
        ]
        mode = "w" if server_round == 1 else self._mode  # another run begins
        with naming(self.path), self.path.open(mode) as file:
            file.write("".join(lines))
        self._mode = "a"


class History(_Lines):
    """Appends a JSON line per round to ``path``: ``RoundInfo.metrics``.

    null means "not finite, or beyond 1e150".
    """

    def __call__(self, info: RoundInfo) -> None:
        self.append(info.server_round, [_without("round", info.metrics)])


class ClientHistory(_Lines):
    """Appends a JSON line per client and round to ``path``: ``RoundInfo.clients``."""

    def __call__(self, info: RoundInfo) -> None:
        rows = [
            {"client": client, **_without("client", _without("round", row))}
            for client, row in sorted(info.clients.items())
        ]
        self.append(info.server_round, rows)


class BestModel:
    """Keeps the global model of the best round, by ``metric``, in ``path`` (safetensors).

    By default the metric is ``test-accuracy`` or else ``eval-accuracy``, with ``smaller`` the loss.
    ``best`` and ``best_round`` are its metric and round; NaN is never the best. Rounds without the
    metric are passed over, and the end of the log says so if no round had it.
    """

    def __init__(self, path: Path, metric: str | None = None, *, smaller: bool = False) -> None:
        self.path, self.smaller = Path(path), smaller
        self.watched = Watched(type(self).__name__, metric, "loss" if smaller else "accuracy")
        self.best: float | None = None
        self.best_round = 0

    def __call__(self, info: RoundInfo) -> None:
        if info.server_round == 1:  # another run begins
            self.best, self.best_round = None, 0
            self.watched.begin()
        if self._better(info.server_round, self.watched.value(info.metrics, info.tested)):
            write_atomically(self.path, model_bytes(info.arrays))

    def recall(self, rows: Rows) -> None:
        """Note the best of the earlier rounds, whose model the file holds, if there is one."""
        if not self.path.exists():
            log(INFO, "%s holds no model of the earlier rounds: the best from now on is", self.path)
            return
        for server_round, value in self.watched.values(rows):
            self._better(server_round, value)

    def run_ended(self) -> None:
        """Say which model the file holds."""
        if self.watched.came("nothing was saved"):
            name = f"{self.watched.metric} {self.best:.6g}"
            log(INFO, "  %s, round %d: %s", self.path, self.best_round, name)

    def _better(self, server_round: int, value: float | None) -> bool:
        best = self.best
        if value is None or math.isnan(value):
            return False
        better = best is None or (value < best if self.smaller else value > best)
        if better:
            self.best, self.best_round = value, server_round
        return better


class EarlyStop:
    """Stops at ``target``, or after ``patience`` rounds without an improvement of ``metric``.

    By default the metric is ``test-accuracy`` or else ``eval-accuracy``, with ``smaller`` the loss.
    Rounds that do not report it, because the server does not test in each, are not counted, nor is
    NaN before the first number. The end of the log says so if no round reported one. Raises
    ``ValueError`` for a ``target`` that is no finite number, and for a ``patience`` that is no
    integer >= 1.
    """

    def __init__(
        self,
        metric: str | None = None,
        *,
        target: float | None = None,
        patience: int | None = None,
        smaller: bool = False,
    ) -> None:
        if target is None and patience is None:
            raise ValueError("EarlyStop needs a target, a patience, or both")
        if target is not None:
            check("target", target)
        if patience is not None:
            check("patience", patience, low=1, integer=True)
        self.watched = Watched(type(self).__name__, metric, "loss" if smaller else "accuracy")
        self.patience, self.sign = patience, -1.0 if smaller else 1.0
        self.target = target
        self._best = -float("inf")
        self._stale = 0

    def __call__(self, info: RoundInfo) -> bool:
        if info.server_round == 1:  # another run begins
            self._best, self._stale = -float("inf"), 0
            self.watched.begin()
        return self._ends(self.watched.value(info.metrics, info.tested))

    def recall(self, rows: Rows) -> None:
        """Count the earlier rounds; a run that ended there does not continue."""
        for _, value in self.watched.values(rows):
            self._ends(value)

    def run_ended(self) -> None:
        """Say if the metric never came."""
        self.watched.came("it could not end the run")

    def _ends(self, value: float | None) -> bool:
        if value is None or (math.isnan(value) and math.isinf(self._best)):
            return False  # it has not come yet
        value *= self.sign
        self._stale = 0 if value > self._best else self._stale + 1
        self._best = max(self._best, value)
        reached = self.target is not None and value >= self.sign * self.target
        return reached or (self.patience is not None and self._stale >= self.patience)


def _without(name: str, row: Mapping[str, float]) -> dict[str, float]:
    return {n: value for n, value in row.items() if n != name}


def finite(value: float) -> float | None:
    """Return ``value`` for a file, or None if it is not finite: JSON has no such numbers.

    None as well beyond ``LARGEST``: whoever reads files can take means and variances.
    """
    return value if abs(value) <= LARGEST else None


def model_bytes(arrays: ArrayRecord) -> bytes:
    """Return a model as the bytes of a safetensors file."""
    return save({name: array.numpy() for name, array in arrays.items()})
