"""The numbers and words that a client reports of its training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from clients.learning.border import Border
from clients.request import Config
from fl_strategies.core.oracle import Solved, Step


def metrics_of(
    algorithm: str, model: Border, steps: Sequence[Step], config: Config
) -> dict[str, Any]:
    """Return the metrics of a request's ``steps``, one for each round, but for their scalars."""
    metrics: dict[str, Any] = {"algorithm": algorithm}
    if "layout" in config:
        same = config["layout"] == model.layout.signature
        metrics["layout"] = model.layout.signature if same else model.layout.roles
    metrics["device"] = model.device.type
    metrics |= of_work([step.solved for step in steps if step.solved is not None])
    # set by Flower's wrappers; a legacy server's strategy does not see it otherwise
    bound = config.get("clipping_norm", config.get("clipping-norm"))
    if bound is not None:
        metrics["clipping-norm"] = bound
    return metrics


def of_work(solved: Sequence[Solved]) -> dict[str, float]:
    """Return the metrics of a request's local work: all steps and epochs, the last loss."""
    if not solved:
        return {}
    last = solved[-1]
    measured = {
        "train-loss": float(last.loss),
        "train-accuracy": float(last.accuracy),
        "residual": float(last.residual),
    }
    metrics = {name: number for name, number in measured.items() if not math.isnan(number)}
    if steps := sum(one.steps for one in solved):
        metrics["steps"] = steps
    if last.epochs is not None:
        metrics["epochs"] = sum(one.epochs for one in solved)
    return {**last.metrics, **metrics}
