"""Figures, drawn from the tables that were written first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # drawing imports it: it takes half a second, and most commands draw nothing
    from matplotlib.figure import Figure

from fl_strategies.core.files import DamagedFile, read_lines

PANELS = (
    ("round", ("test_accuracy",), "test accuracy"),
    ("round", ("test_loss",), "test loss"),
    ("exchanges", ("test_accuracy",), "test accuracy"),
    ("bytes", ("test_accuracy",), "test accuracy"),
    ("seconds", ("test_accuracy",), "test accuracy"),
    ("virtual_seconds", ("test_accuracy",), "test accuracy"),
    ("round", ("own_accuracy", "client_accuracy"), "clients' data: own (-), common (--) model"),
)
"""What is drawn against which columns of ``simulations.tables.curve``, and the label for them."""


def read_history(path: Path, *names: str) -> list[dict[str, float]]:
    """Return the rows of a ``history.jsonl``, each of which has numbers of these ``names``.

    Raises ``ValueError``, with the line, for a damaged one.
    """
    rows = read_lines(path)
    for number, row in enumerate(rows, start=1):
        if lacks := [name for name in names if not isinstance(row.get(name), int | float)]:
            raise DamagedFile(f"{path} is damaged in line {number}: no number {lacks}")
    return rows


def draw_curves(
    rows: Sequence[Mapping[str, Any]], path: Path, panels: Sequence[Any] = PANELS
) -> Figure:
    """Draw each algorithm's mean over its seeds, the standard deviation around it as a band.

    ``rows`` are those of ``simulations.tables.curve``; a panel for which there are none, or which
    would repeat that of rounds, is left out. The n-th reports of the seeds are averaged, in both
    directions, as far as all seeds have one.
    """
    from matplotlib.figure import Figure

    panels = [panel for panel in panels if _tells(rows, panel)]
    columns = min(3, len(panels)) or 1
    down = -(-len(panels) // columns) or 1
    figure = Figure(figsize=(4.5 * columns, 3.5 * down), layout="constrained")
    grid = list(figure.subplots(down, columns, squeeze=False).flat)
    for unused in grid[len(panels) :]:
        unused.remove()
    for axes, (x, ys, label) in zip(grid, panels, strict=False):
        for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
            colour = None
            for y, style in zip(ys, ("-", "--"), strict=False):
                points = _points([row for row in rows if row["algorithm"] == algorithm], x, y)
                across = [fmean(at[0] for at in point) for point in points]
                mean = [fmean(at[1] for at in point) for point in points]
                marker = "." if len(points) == 1 else ""
                name = algorithm if style == "-" else None
                (line,) = axes.plot(across, mean, style + marker, color=colour, label=name)
                colour = line.get_color()
                if points and len(points[0]) > 1:
                    band = [stdev(at[1] for at in point) for point in points]
                    low = [m - d for m, d in zip(mean, band, strict=True)]
                    high = [m + d for m, d in zip(mean, band, strict=True)]
                    axes.fill_between(across, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set(xlabel=x.replace("_", " "), ylabel=label)
    if panels:
        grid[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return figure


def _tells(rows: Sequence[Mapping[str, Any]], panel: Any) -> bool:
    x, ys, _ = panel
    if x == "exchanges" and all(row[x] == row["round"] for row in rows):
        return False
    return any(row[x] is not None and row[y] is not None for row in rows for y in ys)


def _points(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> list[list[tuple[float, float]]]:
    """Return the n-th (x, y) of each seed, for n = 1, 2, ... while all seeds have one."""
    seeds: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        mine = seeds.setdefault(row["seed"], [])
        if row[x] is not None and row[y] is not None:
            mine.append((row[x], row[y]))
    return [list(points) for points in zip(*seeds.values(), strict=False)]
