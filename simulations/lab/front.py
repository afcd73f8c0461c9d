"""The first page's figure, from committed tables: rounds and bytes to a target, against FedAvg's.

    python -m simulations.lab.front

reads ``simulations/lab/notes/fedadmm.md`` and ``notebooks/pages/parts.md``, and writes
``notebooks/pages/rounds-and-bytes.svg``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from simulations.figures import save, styled, title
from simulations.lab.command_line import Command

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTES = Path(__file__).parent / "notes"
PAGES = Path(__file__).resolve().parents[2] / "notebooks/pages"
RULES = {"fedavg-drawn": "fedavg", "fedadmm": "", "feddyn": "", "scaffold": "", "a-fedpd": ""}
"""Rows of the table of rounds that are shown, and the algorithm of a row of another name."""
ROUNDS = 30
"""Of each run in that table: a seed that is not at the target by then counts as so many."""


class Bar(NamedTuple):
    """A bar's name, its value, and the value as text."""

    name: str
    value: float
    text: str


def rounds(page: str) -> list[Bar]:
    """Return the mean number of rounds to 90 % on MNIST of each of ``RULES``, FedAvg first."""
    start = page.index("## The same on MNIST")
    bars = {}
    for line in page[start : page.index("\n## ", start)].splitlines():
        if not (rule := re.match(r"\| \**`([\w-]+)`", line)) or rule[1] not in RULES:
            continue
        cell = line.strip("| ").split("|")[-1]
        seeds = [float(n) for n in re.findall(r"\d+", cell)]
        missed = "none" in cell  # of one seed
        mean = fmean(seeds + [ROUNDS] * missed)
        text = f"more than {mean:.0f}" if missed else f"{mean:.0f}"
        bars[rule[1]] = Bar(title(RULES[rule[1]] or rule[1]), mean, text)
    return [bars[rule] for rule in RULES]


def megabytes(page: str) -> list[Bar]:
    """Return what FedAvg uploads for 96.5 % on MNIST, whole and by top-k."""
    whole, short = re.findall(r"after \d+\s+rounds\s+and\s+([\d.]+)\s+MB", page)
    return [
        Bar("FedAvg", float(whole), whole),
        Bar("FedAvg and\nTopK(share=0.01)", float(short), short),
    ]


@styled
def draw(panels: Sequence[tuple[str, list[Bar]]], path: Path) -> None:
    """Draw a panel of horizontal bars for each title; the first bar of a panel is grey."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 2.3), layout="constrained")
    grid: Sequence[Axes] = figure.subplots(1, len(panels))
    for axes, (name, bars) in zip(grid, panels, strict=True):
        places = range(len(bars))
        colours = ["0.6", *["C0"] * (len(bars) - 1)]
        drawn = axes.barh(places, [bar.value for bar in bars], color=colours, height=0.7)
        axes.bar_label(drawn, [bar.text for bar in bars], padding=4)
        axes.set_title(name, loc="left")
        axes.set_yticks(places, [bar.name for bar in bars])
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.set_xlim(right=1.3 * max(bar.value for bar in bars))
        axes.set_xticks([])
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(length=0)
    save(figure, path)


def read() -> list[tuple[str, list[Bar]]]:
    """Return the figure's panels, from the committed pages."""
    return [
        ("Rounds to 90 % test accuracy", rounds((NOTES / "fedadmm.md").read_text())),
        ("MB of uploads for 96.5 %", megabytes((PAGES / "parts.md").read_text())),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the figure."""
    parser = Command("front", __doc__)
    parser.add_argument("--output", type=Path, default=PAGES, help="where the figure is written")
    path = parser.read(arguments).output / "rounds-and-bytes.png"
    draw(read(), path)
    path.unlink()  # the page shows the vectors


if __name__ == "__main__":
    main()
