"""Callbacks for the end of a round.

Any function of a :class:`RoundInfo` is one; returning ``True`` stops the run after that round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from safetensors.numpy import save

from fl_strategies.files import write_atomically

if TYPE_CHECKING:
    from flwr.app import ArrayRecord


@dataclass(frozen=True)
class RoundInfo:
    """What a person may want to know at the end of a round.

    ``metrics`` holds the round's numbers: training (``train-loss`` ...), clients' evaluation
    (``eval-accuracy`` ...), the server's (``test-accuracy`` ...), bytes, clients and seconds.
    ``clients`` holds, by client id, the numbers of each reply that was used: ``examples``,
    ``data-share`` and ``weight-share`` (of the round's examples, and in the next model) of those
    that trained, and what they measured.
    """

    server_round: int
    num_rounds: int
    arrays: ArrayRecord
    metrics: Mapping[str, float]
    clients: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


Callback: TypeAlias = Callable[[RoundInfo], bool | None]


class History:
    """Appends one JSON line a round to ``path``, written out at once; null is "not finite"."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.write_text("")

    def __call__(self, info: RoundInfo) -> None:
        with self.path.open("a") as file:
            row = {name: finite(value) for name, value in info.metrics.items()}
            file.write(json.dumps({"round": info.server_round, **row}) + "\n")


class ClientHistory:
    """Appends one JSON line per client and round to ``path``: ``RoundInfo.clients``.

    A round's lines are written out at once, in one piece; null is "not finite".
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.write_text("")

    def __call__(self, info: RoundInfo) -> None:
        lines = []
        for client, numbers in sorted(info.clients.items()):
            row = {name: finite(value) for name, value in numbers.items()}
            lines.append(json.dumps({"round": info.server_round, "client": client, **row}) + "\n")
        with self.path.open("a") as file:
            file.write("".join(lines))


class BestModel:
    """Keeps the model of the best round in ``path`` (safetensors), by a metric.

    ``best`` and ``best_round`` tell what it holds; NaN is never the best. Raises ``KeyError`` when
    a round lacks ``metric``.
    """

    def __init__(self, path: Path, metric: str = "test-accuracy", *, smaller: bool = False) -> None:
        self.path, self.metric, self.smaller = Path(path), metric, smaller
        self.best: float | None = None
        self.best_round = 0

    def __call__(self, info: RoundInfo) -> None:
        value = info.metrics[self.metric]
        if math.isnan(value):
            return
        if self.best is None or (value < self.best if self.smaller else value > self.best):
            self.best, self.best_round = value, info.server_round
            write_atomically(self.path, model_bytes(info.arrays))


class EarlyStop:
    """Stops at ``target``, or after ``patience`` rounds in which ``metric`` did not improve.

    Raises ``KeyError`` when a round lacks ``metric``.
    """

    def __init__(
        self,
        metric: str = "test-accuracy",
        *,
        target: float | None = None,
        patience: int | None = None,
        smaller: bool = False,
    ) -> None:
        if target is None and patience is None:
            raise ValueError("EarlyStop needs a target, a patience, or both")
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be >= 1, got {patience}")
        self.metric, self.patience, self.sign = metric, patience, -1.0 if smaller else 1.0
        self.target = target
        self._best = -float("inf")
        self._stale = 0

    def __call__(self, info: RoundInfo) -> bool:
        value = self.sign * info.metrics[self.metric]
        self._stale = 0 if value > self._best else self._stale + 1
        self._best = max(self._best, value)
        reached = self.target is not None and value >= self.sign * self.target
        return reached or (self.patience is not None and self._stale >= self.patience)


def finite(value: float) -> float | None:
    """Return ``value``, or None where it is not finite: JSON has no such numbers."""
    return value if math.isfinite(value) else None


def model_bytes(arrays: ArrayRecord) -> bytes:
    """Return a model as the bytes of a safetensors file."""
    return save({name: array.numpy() for name, array in arrays.items()})
