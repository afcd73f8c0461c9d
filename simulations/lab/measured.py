"""What a run came to: the figures that the board compares, their names and their units."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, Literal, NamedTuple

from simulations.config import RunConfig
from simulations.figures import read_history
from simulations.tables import curve, run_figures

LATE = 10
"""Tests, or rounds, at the end of a run that a ``late`` figure averages."""

Figure = Literal[
    "rounds_to_target",
    "final_accuracy",
    "late_accuracy",
    "own_accuracy",
    "worst_tenth",
    "best_tenth",
    "variance",
    "gradient_norm2",
]
"""``late_accuracy`` is the mean over the last ten tests: partial participation is noisy.
``own_accuracy`` is the mean over clients, on their own test samples, of the personalized models; of
the global model where there are none. ``worst_tenth``, ``best_tenth`` and ``variance`` are of the
global model's accuracies on each client's own test samples: the means over the worst and the best
tenth of the clients, and the variance over clients; each is a mean over the last ten rounds.
``gradient_norm2`` is ||grad f||^2 of the mean loss f at the end (``gradient-norm``)."""


class Kind(NamedTuple):
    """How a figure is called, and how it is written."""

    name: str
    unit: float = 100.0
    sign: str = " %"
    less_is_better: bool = False
    form: str = ".1f"


KINDS: dict[str, Kind] = {
    "rounds_to_target": Kind("rounds to the target", 1.0, "", True),
    "final_accuracy": Kind("final test accuracy (%)"),
    "late_accuracy": Kind("test accuracy, mean of the last ten tests (%)"),
    "own_accuracy": Kind("accuracy on clients' own test samples (%)"),
    "worst_tenth": Kind("accuracy of the worst tenth of the clients (%)"),
    "best_tenth": Kind("accuracy of the best tenth of the clients (%)"),
    "variance": Kind("variance of accuracy over clients (%²)", 1e4, "", True),
    "gradient_norm2": Kind("squared norm of the gradient of the mean loss", 1.0, "", True, ".1e"),
}

SPREAD: dict[str, Callable[[Sequence[float]], float]] = {
    "worst_tenth": lambda ascending: fmean(ascending[: math.ceil(len(ascending) / 10)]),
    "best_tenth": lambda ascending: fmean(ascending[-math.ceil(len(ascending) / 10) :]),
    "variance": pvariance,
}
"""Of the clients' accuracies in ascending order; a tenth is rounded up."""


def summary(config: RunConfig) -> dict[str, Any]:
    """Return the run's ``summary.json``."""
    read: dict[str, Any] = json.loads((Path(config.output) / "summary.json").read_text())
    return read


def value(config: RunConfig, figure: Figure, missed: float) -> float:
    """Return a finished run's figure.

    A run that did not reach its target has ``missed``; one in which nothing was tested has 0.
    """
    if figure in SPREAD:
        return spread(config, SPREAD[figure])
    if figure == "late_accuracy":
        tests = [row["test_accuracy"] for row in curve(config) if row["test_accuracy"] is not None]
        return fmean(tests[-LATE:]) if tests else 0.0
    figures = run_figures(config, summary(config))
    number = figures[figure]
    if number is None and figure == "own_accuracy":
        number = figures["client_accuracy"]
    if number is None:
        return missed if KINDS[figure].less_is_better else 0.0
    return number


def spread(config: RunConfig, over: Callable[[Sequence[float]], float]) -> float:
    """Return a figure of the clients' accuracies, mean over the last rounds.

    Raises ``ValueError`` for a run in which no client evaluated.
    """
    rounds: dict[int, list[float]] = {}
    for row in read_history(Path(config.output) / "clients.jsonl"):
        if (accuracy := row.get("eval-accuracy")) is not None:
            rounds.setdefault(int(row["round"]), []).append(accuracy)
    if not rounds:
        raise ValueError(f"no client evaluated in {config.output}: set fraction-evaluate")
    return fmean(over(sorted(rounds[number])) for number in sorted(rounds)[-LATE:])
