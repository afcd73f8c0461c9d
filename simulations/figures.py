"""Figures, drawn from the tables that were written first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure


def read_history(path: Path) -> list[dict[str, float]]:
    """Return the rows of a ``history.jsonl``."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw_curve(history: Path, path: Path, label: str) -> None:
    """Draw one run's test accuracy and loss against rounds."""
    draw_curves({label: history}, path)


def draw_curves(histories: Mapping[str, Path], path: Path) -> None:
    """Draw several runs' test accuracy and test loss against rounds, side by side."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    accuracy, loss = figure.subplots(1, 2)
    for label, history in histories.items():
        rows = read_history(history)
        rounds = [row["round"] for row in rows]
        accuracy.plot(rounds, [row["test-accuracy"] for row in rows], label=label)
        loss.plot(rounds, [row["test-loss"] for row in rows], label=label)
    accuracy.set(xlabel="round", ylabel="test accuracy")
    loss.set(xlabel="round", ylabel="test loss")
    if histories:
        accuracy.legend()
    figure.savefig(path, dpi=120)
