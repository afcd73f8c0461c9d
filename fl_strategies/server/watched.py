"""The metric of a run that a callback watches: a named one, or the run's accuracy or loss."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from logging import INFO

from fl_strategies.core.log import log
from fl_strategies.core.metric_names import SERVER, SPREAD
from fl_strategies.core.schedules import require
from fl_strategies.core.spelling import unknown

KINDS = {"loss": ("loss",), "accuracy": ("accuracy", "acc")}
"""The words in the names of each kind of metric."""
ORDER = ("test", "", "eval")
"""What comes before that word, the first choice first: the server's tests, then the clients'."""
TRAINING = ("train", "client")
"""First words of names that are never chosen: what clients measure on their training samples."""


def choose(kind: str, names: Collection[str]) -> list[str]:
    """Return the metrics among ``names`` that a run's ``kind`` of metric may be, ascending.

    These are the first of: ``test-accuracy``; ``accuracy``; ``eval-accuracy``; any other name with
    this last word, such as ``val_accuracy`` (``acc`` is accuracy, ``_`` is ``-``). One name is the
    metric; several names are as good as each other.

    Examples
    --------
    >>> choose("accuracy", ["eval_acc", "train-accuracy", "loss", "accuracy"])
    ['accuracy']
    >>> choose("accuracy", ["val_acc", "hospital-accuracy"])
    ['hospital-accuracy', 'val_acc']
    """
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        *first, last = re.split("[-_]", name.lower())
        if last in KINDS[kind] and not {*first[:1]} & {*TRAINING}:
            found.setdefault("-".join(first), []).append(name)
    for before in ORDER:
        if before in found:
            return found[before]
    return sorted(name for group in found.values() for name in group)


def check_metric(who: str, metric: str | None, kind: str) -> None:
    """Raise ``ValueError`` for a metric that is no text, or an "accuracy" that is a loss."""
    named = metric is None or isinstance(metric, str)
    require(named, "metric", "the name of a metric, or None", metric)
    if metric and kind == "accuracy" and metric.endswith("loss"):
        raise ValueError(f"{who}: the smaller {metric!r} is the better one: give smaller=True")


class Watched:
    """The ``metric`` that ``who`` watches; None is the run's metric of this ``kind``.

    ``kind`` is "accuracy" or "loss". Raises what :func:`check_metric` raises.
    """

    def __init__(self, who: str, metric: str | None, kind: str) -> None:
        check_metric(who, metric, kind)
        self.who, self.kind, self.metric, self._found = who, kind, metric, False

    def value(self, metrics: Mapping[str, float], tested: Collection[str] = ()) -> float | None:
        """Return the metric in a round; None if the round does not report it.

        ``tested`` names what the server's tests report in other rounds. Raises ``ValueError``,
        which says which metrics there are, if the first round leaves open which it is.
        """
        if not self._found:
            self._find({*metrics, *tested})
        assert self.metric is not None
        return metrics.get(self.metric)

    def values(self, rows: Mapping[int, Mapping[str, float]]) -> Iterator[tuple[int, float | None]]:
        """Yield the round and the metric of earlier rounds."""
        tested = {name for row in rows.values() for name in row}
        for server_round, row in rows.items():
            yield server_round, self.value(row, tested)

    def _find(self, names: Collection[str]) -> None:
        said = f"{self.who} finds no metric"
        if self.metric is not None:
            if self.metric not in names:
                raise ValueError(f"{said} {unknown([self.metric], names)}; {_are(names)}")
        else:
            found = choose(self.kind, names)
            if len(found) != 1:
                what = f"one {self.kind} among {found}" if found else f"{self.kind} in this run"
                raise ValueError(f"{said} that is the {what}: give metric=...; {_are(names)}")
            self.metric = found[0]
            log(INFO, "%s watches %s", self.who, self.metric)
        self._found = True


def _are(names: Collection[str]) -> str:
    """Return the names that a person may want to watch, as text."""
    few = [n for n in sorted(names) if n not in SERVER and not n.endswith(SPREAD)]
    return f"there are {', '.join(few)}"
