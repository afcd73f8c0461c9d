"""The first page's figure, from the table of global models: their differences to FedAvg.

    python -m simulations.lab.front

reads ``simulations/lab/notes/comparisons.md`` and writes ``notebooks/pages/global-models.svg``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from simulations.figures import save, styled, title
from simulations.lab.command_line import Command

NOTES = Path(__file__).parent / "notes"
PAGES = Path(__file__).resolve().parents[2] / "notebooks/pages"
SETS = ("digits, Dirichlet(0.1)", "synthetic, a distribution for each client")


class Difference(NamedTuple):
    """A rule's difference to FedAvg in points, mean and half of the 95 % interval, by data set."""

    rule: str
    means: tuple[float, ...]
    halves: tuple[float, ...]


def differences(text: str) -> list[Difference]:
    """Return the differences in the table of global models, best first."""
    table = text[text.index("**Global models.**") : text.index("**Personalized models.**")]
    found = []
    for line in table.splitlines():
        pairs = re.findall(r"\| ([+-][\d.]+) ± ([\d.]+) ", line)
        if len(pairs) == len(SETS):
            means, halves = zip(*pairs, strict=True)
            rule = line.split("|")[1].strip()
            found.append(Difference(rule, tuple(map(float, means)), tuple(map(float, halves))))
    return sorted(found, key=lambda each: -sum(each.means))


@styled
def draw(found: list[Difference], path: Path) -> None:
    """Draw a panel for each data set; rules whose interval lies above 0 have their own colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    for panel, (axes, name) in enumerate(
        zip(figure.subplots(1, 2, sharey=True), SETS, strict=True)
    ):
        for place, each in enumerate(found):
            mean, half = each.means[panel], each.halves[panel]
            colour = "C0" if mean - half > 0 else "0.6"
            axes.errorbar(mean, place, xerr=half, fmt="o", color=colour)
        axes.axvline(0.0, color="black", linewidth=0.8)
        axes.set(title=name, xlabel="points of test accuracy above FedAvg")
        axes.grid(visible=False, axis="y")
        axes.set_yticks(range(len(found)), [title(each.rule) for each in found])
        axes.set_ylim(len(found) - 0.5, -0.5)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the figure."""
    parser = Command("front", __doc__)
    parser.add_argument("--output", type=Path, default=PAGES, help="where the figure is written")
    path = parser.read(arguments).output / "global-models.png"
    draw(differences((NOTES / "comparisons.md").read_text()), path)
    path.unlink()  # the page shows the vectors


if __name__ == "__main__":
    main()
