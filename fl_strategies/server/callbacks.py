"""Callbacks for the end of a round.

Any function of a :class:`RoundInfo` is a callback. If it returns ``True``, the run stops after this
round. If it raises, the run also ends, after the other callbacks have seen the round and the
checkpoint is written; a resumed run continues with the next round. When a run is resumed, a
callback with a method ``recall(rows)`` gets the metrics of the earlier rounds, by round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from safetensors.numpy import save

from fl_strategies.core.files import DamagedFile, naming, read_lines, write_atomically
from fl_strategies.core.schedules import check
from fl_strategies.core.spelling import hinted
from fl_strategies.server.watched import Watched

if TYPE_CHECKING:
    from flwr.app import ArrayRecord


@dataclass(frozen=True)
class RoundInfo:
    """What a person may want to know at the end of a round.

    ``metrics`` holds the round's numbers: training (``train-loss`` ...), clients' evaluation
    (``eval-accuracy`` ...), the server's tests (``test-accuracy`` ...), bytes, clients and seconds.
    A client's metric under a name that is not the client's is called ``client-...`` (``names``).
    ``clients`` holds, by client id, the numbers of each used reply: ``samples``, ``data-share``
    (of the round's samples) and ``weight-share`` (of the next global model) of clients that
    trained, and what they measured. ``tested`` holds the names of the metrics that the server's
    tests have reported in the run so far, also if they reported none in this round.
    """

    server_round: int
    num_rounds: int
    arrays: ArrayRecord
    metrics: Mapping[str, float]
    clients: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    tested: frozenset[str] = frozenset()


Callback: TypeAlias = Callable[[RoundInfo], bool | None]
Rows: TypeAlias = Mapping[int, Mapping[str, float]]


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
    """Appends a JSON line per round to ``path``: ``RoundInfo.metrics``; null means "not finite"."""

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


@hinted
class BestModel:
    """Keeps the global model of the best round, by ``metric``, in ``path`` (safetensors).

    By default the metric is the run's accuracy, or with ``smaller`` its loss (:class:`Watched`).
    ``best`` and ``best_round`` are its metric and round; NaN is never the best. Raises
    ``ValueError`` in the first round if the run has no such metric.
    """

    def __init__(self, path: Path, metric: str | None = None, *, smaller: bool = False) -> None:
        self.path, self.smaller = Path(path), smaller
        self.watched = Watched(type(self).__name__, metric, "loss" if smaller else "accuracy")
        self.best: float | None = None
        self.best_round = 0

    def __call__(self, info: RoundInfo) -> None:
        if info.server_round == 1:  # another run begins
            self.best, self.best_round = None, 0
        if self._better(info.server_round, self.watched.value(info.metrics, info.tested)):
            write_atomically(self.path, model_bytes(info.arrays))

    def recall(self, rows: Rows) -> None:
        """Note the best of the earlier rounds; the file already holds its model."""
        for server_round, value in self.watched.values(rows):
            self._better(server_round, value)

    def _better(self, server_round: int, value: float | None) -> bool:
        best = self.best
        if value is None or math.isnan(value):
            return False
        better = best is None or (value < best if self.smaller else value > best)
        if better:
            self.best, self.best_round = value, server_round
        return better


@hinted
class EarlyStop:
    """Stops at ``target``, or after ``patience`` rounds without an improvement of ``metric``.

    By default the metric is the run's accuracy, or with ``smaller`` its loss (:class:`Watched`).
    Rounds that do not report it, because the server does not test in each, are not counted. Raises
    ``ValueError`` for a ``target`` that is no finite number, for a ``patience`` that is no integer
    >= 1, and in the first round if the run has no such metric.
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
        return self._ends(self.watched.value(info.metrics, info.tested))

    def recall(self, rows: Rows) -> None:
        """Count the earlier rounds; a run that ended there does not continue."""
        for _, value in self.watched.values(rows):
            self._ends(value)

    def _ends(self, value: float | None) -> bool:
        if value is None:
            return False
        value *= self.sign
        self._stale = 0 if value > self._best else self._stale + 1
        self._best = max(self._best, value)
        reached = self.target is not None and value >= self.sign * self.target
        return reached or (self.patience is not None and self._stale >= self.patience)


def _without(name: str, row: Mapping[str, float]) -> dict[str, float]:
    return {n: value for n, value in row.items() if n != name}


def finite(value: float) -> float | None:
    """Return ``value``, or None if it is not finite: JSON has no such numbers."""
    return value if math.isfinite(value) else None


def model_bytes(arrays: ArrayRecord) -> bytes:
    """Return a model as the bytes of a safetensors file."""
    return save({name: array.numpy() for name, array in arrays.items()})
