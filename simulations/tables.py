"""The tables of a comparison: each run's results by round, and each algorithm's over seeds.

Numbers are those of the runs' files: accuracies are shares, sizes are bytes. Only Markdown, which
is for people, has per cent and megabytes.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

from fl_strategies.core.files import write_atomically
from fl_strategies.core.settings_text import format_params, parse_params
from simulations.config import RunConfig, hyperparameter_defaults
from simulations.figures import read_history

Row: TypeAlias = dict[str, Any]

AXES = {
    "rounds": "round",
    "communication_rounds": "communication_rounds",
    "bytes": "bytes",
    "seconds": "seconds",
    "virtual_seconds": "virtual_seconds",
}
"""What is counted until a target is reached, and the column of :func:`curve` that counts it."""

FIGURES: dict[str, tuple[str, float, str]] = {
    "final_accuracy": ("final accuracy", 100, ".2f"),
    "best_accuracy": ("best", 100, ".2f"),
    "rounds_to_target": ("rounds to {target}", 1, ".4g"),
    "communication_rounds_to_target": ("communication rounds to {target}", 1, ".4g"),
    "bytes_to_target": ("MB to {target}", 1e-6, ".2f"),
    "seconds_to_target": ("seconds to {target}", 1, ".1f"),
    "virtual_seconds_to_target": ("virtual s to {target}", 1, ".1f"),
    "bytes_up": ("MB up", 1e-6, ".2f"),
    "bytes_down": ("MB down", 1e-6, ".2f"),
    "seconds": ("seconds", 1, ".1f"),
    "virtual_seconds": ("virtual s", 1, ".1f"),
    "gradient_norm2": ("‖∇f‖²", 1, ".1e"),
    "epsilon": ("epsilon", 1, ".2f"),
    "missing": ("lost replies", 100, ".1f"),
    "client_accuracy": ("on clients' data", 100, ".2f"),
    "own_accuracy": ("personalized models", 100, ".2f"),
    "accuracy_variance": ("variance over clients", 1, ".4f"),
    "accuracy_worst": ("worst client", 100, ".2f"),
    "accuracy_smallest": ("smallest client", 100, ".2f"),
    "accuracy_largest": ("largest client", 100, ".2f"),
}
"""Figures of a run: their heads, factors and formats in Markdown."""

CLIENTS = {
    "client_accuracy": "eval-accuracy-mean",
    "own_accuracy": "own-accuracy-mean",
    "accuracy_variance": "eval-accuracy-variance",
    "accuracy_worst": "eval-accuracy-min",
    "accuracy_smallest": "eval-accuracy-smallest",
    "accuracy_largest": "eval-accuracy-largest",
}
"""A history's names for measurements on the clients' own data: the mean accuracy of the global
model and of the personalized models; the global model's variance over clients, and its accuracy at
the worst, the smallest and the largest client."""


def curve(config: RunConfig) -> list[Row]:
    """Return a row for each line of the run's history; None stands for a missing number.

    ``round`` counts the algorithm's rounds (FedPD has some without communication). ``bytes`` are
    uploads and downloads; ``bytes``, ``seconds`` and ``virtual_seconds`` are sums since the first
    round.
    """
    path = Path(config.output) / "history.jsonl"
    history = read_history(path, "bytes-up", "bytes-down", "seconds")
    sent = accumulate(row["bytes-up"] + row["bytes-down"] for row in history)
    spent = accumulate(row["seconds"] for row in history)
    return [
        {
            "algorithm": config.rule,
            "seed": config.seed,
            "round": int(row.get("algorithm-round", row["round"])),
            "communication_rounds": int(row.get("communication-rounds", row["round"])),
            "bytes": int(all_bytes),
            "seconds": seconds,
            "virtual_seconds": row.get("virtual-seconds"),
            "test_accuracy": row.get("test-accuracy"),
            "test_loss": row.get("test-loss"),
            **{name: row.get(CLIENTS[name]) for name in ("client_accuracy", "own_accuracy")},
        }
        for row, all_bytes, seconds in zip(history, sent, spent, strict=True)
    ]


def run_figures(config: RunConfig, summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the ``FIGURES`` of one run; None stands for a missing figure or unreached target."""
    rows = curve(config)
    measured = (row for row in rows if row["test_accuracy"] is not None)
    reached = next((row for row in measured if row["test_accuracy"] >= config.target), None)
    figures: dict[str, float | None] = {
        f"{name}_to_target": reached[column] if reached else None for name, column in AXES.items()
    }
    evaluated = [
        row for row in read_history(Path(config.output) / "history.jsonl") if "eval-accuracy" in row
    ]
    figures |= {
        name: evaluated[-1].get(key) if evaluated else None for name, key in CLIENTS.items()
    }
    figures["virtual_seconds"] = rows[-1]["virtual_seconds"] if rows else None
    return {name: figures.get(name, summary.get(name)) for name in FIGURES}


def algorithm_row(configs: Sequence[RunConfig], summaries: Sequence[Mapping[str, Any]]) -> Row:
    """Return the row of one algorithm: each figure's mean over the seeds and standard deviation.

    ``..._to_target`` are means over the seeds that reached the target; ``reached`` is their number.
    Deviations are sample standard deviations, None for a single number.
    """
    runs = [run_figures(c, summary) for c, summary in zip(configs, summaries, strict=True)]
    first = configs[0]
    row: Row = {
        "algorithm": first.rule,
        "seeds": " ".join(str(config.seed) for config in configs),
        "target": first.target,
        "reached": sum(run["rounds_to_target"] is not None for run in runs),
    }
    for name in FIGURES:
        values = [value for run in runs if (value := run[name]) is not None]
        row[name] = fmean(values) if values else None
        row[f"{name}_deviation"] = stdev(values) if len(values) > 1 else None
    reduction = first.variance_reduction.replace("off", "")
    solver = " ".join(filter(None, [first.solver, first.solver_params, reduction]))
    direction = first.sam_direction.replace("local", "")
    solver += f" sam {first.sam:g} {direction}".rstrip() * (first.sam > 0)
    settings = f"{first.model}, {solver} lr {first.lr:g}, momentum {first.momentum:g}"
    params = hyperparameter_defaults(first.algorithm) | parse_params(first.params)
    shown = {name: value for name, value in params.items() if value not in (None, 0)}
    parts = [str(part) for part in first.parts.values()]
    return row | {"settings": ", ".join([f"{settings} {format_params(shown)}".strip(), *parts])}


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows of :func:`algorithm_row` as a Markdown table, without empty columns."""
    if not rows:
        return "No run has finished.\n"
    always = ("final_accuracy", "best_accuracy", "rounds_to_target")
    names = [n for n in FIGURES if n in always or any(row[n] is not None for row in rows)]
    if not any(row["missing"] for row in rows):
        names = [name for name in names if name != "missing"]
    if all(row["communication_rounds_to_target"] == row["rounds_to_target"] for row in rows):
        names = [name for name in names if name != "communication_rounds_to_target"]
    target = f"{100 * rows[0]['target']:g} %"
    heads = [FIGURES[name][0].format(target=target) for name in names]
    shown = [
        [row["algorithm"], *(_shown(row, name) for name in names), row["settings"]] for row in rows
    ]
    return grid(["algorithm", *heads, "settings"], shown)


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of texts."""
    lines = [f"| {' | '.join(line)} |\n" for line in (heads, *rows)]
    return "".join([lines[0], "|---" * len(heads) + "|\n", *lines[1:]])


def _shown(row: Row, name: str) -> str:
    _, factor, form = FIGURES[name]
    if row[name] is None:
        return "-"
    text = format(factor * row[name], form)
    if (deviation := row[f"{name}_deviation"]) is not None:
        text += f" ± {factor * deviation:{form}}"
    seeds = len(row["seeds"].split())
    if name.endswith("_to_target") and row["reached"] < seeds:
        text += f" ({row['reached']} of {seeds})"
    return text + " %" * (factor == 100)


# ---- files ------------------------------------------------------------------------------------


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that all have the same columns."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def write_table(stem: Path, rows: Sequence[Mapping[str, Any]], text: str) -> None:
    """Write a table as ``stem.md`` (``text``), ``stem.csv`` and ``stem.json``."""
    write_atomically(stem.with_suffix(".md"), text.encode())
    write_csv(stem.with_suffix(".csv"), rows)
    write_atomically(stem.with_suffix(".json"), json.dumps(rows, indent=2).encode())
