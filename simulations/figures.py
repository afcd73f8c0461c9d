"""Figures, drawn from tables that were written before."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # drawing imports it: it takes half a second, and most commands draw nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from fl_strategies import STRATEGIES
from fl_strategies.core.files import DamagedFile, naming, read_lines

P = ParamSpec("P")
T = TypeVar("T")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#888888")
"""Okabe's and Ito's, which colour-blind readers tell apart."""
STYLE: Mapping[str, Any] = {
    "axes.grid": True,
    "axes.prop_cycle": f"cycler(color={COLOURS})",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.figsize": (6.0, 3.5),
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.fontsize": "small",
    "legend.frameon": False,
    "svg.hashsalt": "fl_strategies",  # equal figures are equal files
}
"""How all figures look: ``plt.rcParams.update(STYLE)`` in a notebook."""


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Have a function draw and save its figure in this style."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        from matplotlib import rc_context

        style: Any = STYLE
        with rc_context(style):
            return draw(*args, **kwargs)

    return drawn


class Panel(NamedTuple):
    """A panel: its columns of ``simulations.tables.curve``, and their units."""

    x: str
    ys: tuple[str, ...]
    across: str
    up: str
    across_unit: float = 1.0
    up_unit: float = 100.0


PANELS = (
    Panel("round", ("test_accuracy",), "round", "test accuracy (%)"),
    Panel("round", ("test_loss",), "round", "test loss (nats)", up_unit=1.0),
    Panel("communication_rounds", ("test_accuracy",), "communication round", "test accuracy (%)"),
    Panel("bytes", ("test_accuracy",), "download and upload (MB)", "test accuracy (%)", 1e-6),
    Panel("seconds", ("test_accuracy",), "computing time (s)", "test accuracy (%)"),
    Panel("virtual_seconds", ("test_accuracy",), "virtual time (s)", "test accuracy (%)"),
    Panel(
        "round",
        ("own_accuracy", "client_accuracy"),
        "round",
        "accuracy on clients' data (%):\npersonalized (-), global (--) model",
    ),
)


def read_history(path: Path, *names: str) -> list[dict[str, float]]:
    """Return the rows of a ``history.jsonl``; each must have numbers of these ``names``.

    Raises ``ValueError``, with the line's number, for a damaged line.
    """
    rows = read_lines(path)
    for number, row in enumerate(rows, start=1):
        if lacks := [name for name in names if not isinstance(row.get(name), int | float)]:
            raise DamagedFile(f"{path} is damaged in line {number}: no number {lacks}")
    return rows


@styled
def draw_curves(
    rows: Sequence[Mapping[str, Any]], path: Path, panels: Sequence[Panel] = PANELS
) -> Figure:
    """Draw each algorithm's mean over its seeds, with its standard deviation as a band.

    ``rows`` are those of ``simulations.tables.curve``. A panel is left out if it has no data, or if
    it would repeat the panel of rounds. The n-th reports of the seeds are averaged, in both
    directions, while all seeds have one. Each panel shows the range of the curves after their
    first quarter. The figure is written to ``path`` (PNG), and as vectors (SVG) next to it.
    """
    from matplotlib.figure import Figure

    panels = [panel for panel in panels if _tells(rows, panel)]
    counts = panels_by_line(len(panels))
    widest = max(counts, default=1)
    figure = Figure(figsize=(4.0 * widest, 3.0 * len(counts) + 0.3), layout="constrained")
    grid = figure.add_gridspec(max(len(counts), 1), 6)
    places = [(line, n, count) for line, count in enumerate(counts) for n in range(count)]
    drawn = []
    for panel, (line, n, count) in zip(panels, places, strict=True):
        width = 6 // count
        axes = figure.add_subplot(grid[line, n * width : (n + 1) * width])
        _draw_panel(axes, panel, rows)
        drawn.append(axes)
    if drawn:
        drawn[0].legend()
    seeds = len({row["seed"] for row in rows})
    if seeds > 1:
        caption = f"Lines: means over {seeds} seeds; bands: ± one standard deviation."
        figure.supxlabel(caption, fontsize="small")
    save(figure, path)
    return figure


MOST_ROWS = 100
"""Of a figure of a partition."""


@styled
def draw_partition(counts: NDArray[Any], path: Path) -> None:
    """Draw each client's samples of each class, ``counts`` [clients, classes] of ``describe``.

    Of more than ``MOST_ROWS`` clients it shows as many, evenly spaced. Written to ``path`` (PNG),
    and as vectors (SVG) next to it; existing files are replaced.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    known, classes = counts.shape
    clients = min(known, MOST_ROWS)
    shown = np.linspace(0, known - 1, clients).round().astype(int)
    counts = counts[shown]
    colours = colormaps["viridis"]  # which colour-blind readers tell apart, by its lightness
    figure = Figure(figsize=(8, 2 + 0.1 * clients), layout="constrained")
    axes = figure.add_subplot(xlabel="samples", ylabel="client", ylim=(clients - 0.5, -0.5))
    some = f", {clients} of {known:,} clients" if clients < known else ""
    axes.set_title(f"Samples of each class at each client{some}")
    places = np.unique(np.linspace(0, clients - 1, min(clients, 11)).round().astype(int))
    axes.set_yticks(places, [f"{shown[place]:,}" for place in places])
    axes.grid(visible=False)
    ends = np.cumsum(counts, axis=1)
    for c in range(classes):
        axes.stairs(  # one shape a class: a bar for each client and class would take minutes
            ends[:, c],
            np.arange(clients + 1) - 0.5,
            baseline=ends[:, c] - counts[:, c],
            orientation="horizontal",
            fill=True,
            color=colours(c / max(classes - 1, 1)),
            label=str(c),
        )
    figure.legend(title="class", loc="outside right upper", ncols=-(-classes // 25))
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write the figure to ``path`` (PNG), and as vectors (SVG) next to it, reproducibly."""
    with warnings.catch_warnings():
        # matplotlib warns of the second that a busy machine takes to place a legend
        warnings.filterwarnings("ignore", "Creating legend with loc")
        with naming(path):
            figure.savefig(path, dpi=120)
        vectors = path.with_suffix(".svg")
        with naming(vectors):
            figure.savefig(vectors, metadata={"Date": None})


def panels_by_line(count: int) -> list[int]:
    """Return the number of panels in each line, at most three, as even as possible."""
    lines = -(-count // 3)
    return [count // lines + (line < count % lines) for line in range(lines)]


def _draw_panel(axes: Axes, panel: Panel, rows: Sequence[Mapping[str, Any]]) -> None:
    shown: list[float] = []
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        colour = None
        for y, style in zip(panel.ys, ("-", "--"), strict=False):
            points = _points([row for row in rows if row["algorithm"] == algorithm], panel.x, y)
            across = [panel.across_unit * fmean(at[0] for at in point) for point in points]
            mean = [panel.up_unit * fmean(at[1] for at in point) for point in points]
            marker = "." if len(points) == 1 else ""
            label = title(algorithm) if style == "-" else None
            (line,) = axes.plot(across, mean, style + marker, color=colour, label=label)
            colour = line.get_color()
            shown += mean[len(mean) // 4 :]
            if points and len(points[0]) > 1:
                band = [panel.up_unit * stdev(at[1] for at in point) for point in points]
                low = [m - d for m, d in zip(mean, band, strict=True)]
                high = [m + d for m, d in zip(mean, band, strict=True)]
                axes.fill_between(across, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set(xlabel=panel.across, ylabel=panel.up)
    if max(shown) > min(shown):
        margin = 0.1 * (max(shown) - min(shown))
        axes.set_ylim(min(shown) - margin, max(shown) + margin)


def title(algorithm: str) -> str:
    """Return an algorithm's proper name; any other label stays as it is."""
    card = getattr(STRATEGIES.get(algorithm), "card", None)  # an algorithm of one's own needs none
    return algorithm if card is None else card.title


def _tells(rows: Sequence[Mapping[str, Any]], panel: Panel) -> bool:
    if panel.x == "communication_rounds" and all(row[panel.x] == row["round"] for row in rows):
        return False
    return any(row[panel.x] is not None and row[y] is not None for row in rows for y in panel.ys)


def _points(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> list[list[tuple[float, float]]]:
    """Return the n-th (x, y) of each seed, for n = 1, 2, ... while all seeds have one."""
    seeds: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        points = seeds.setdefault(row["seed"], [])
        if row[x] is not None and row[y] is not None:
            points.append((row[x], row[y]))
    return [list(points) for points in zip(*seeds.values(), strict=False)]
