"""Which algorithm? The cost of a target accuracy, of each rule on several data sets.

    python -m simulations.lab.which DIR [--output FOLDER]

prints a Markdown table of the comparisons in the folders of DIR (``simulations.lab.compare``), in
the order of their names: the rounds, the megabytes of both directions and the seconds of
computation until the target, means over the seeds. A seed that is never there counts with all of
its rounds, and the mean is written as "more than". ``--output`` gets ``rounds-and-bytes.svg``:
rounds and megabytes as shares of FedAvg's.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from simulations.figures import COLOURS, save, styled, title
from simulations.lab.command_line import Command
from simulations.tables import grid

UNITS = {"round": 1.0, "bytes": 1e-6, "seconds": 1.0}
"""The columns of ``curves.csv`` that are shown, and their units."""
FIRST = "fedavg"
"""The rule that the others are shown next to."""
SHARES = (0.5, 1.0, 2.0, 4.0)
"""Ticks of the figure."""


class Cost(NamedTuple):
    """What a rule spends until the target; ``missed`` is the share of seeds without it."""

    round: float
    bytes: float
    seconds: float
    missed: float

    def __str__(self) -> str:
        more = "more than " if self.missed else ""
        return f"{more}{self.round:.0f}, {_two(self.bytes)} MB, {_two(self.seconds)} s"


Costs = Mapping[str, Cost]
"""By rule."""


def costs(folder: Path) -> Costs:
    """Return the costs of a comparison."""
    finished = json.loads((folder / "table.json").read_text())
    if not finished:
        raise ValueError(f"{folder} has no finished run")
    target = finished[0]["target"]
    with (folder / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    ends: dict[str, list[Cost]] = {}
    for (rule, _), group in groupby(rows, itemgetter("algorithm", "seed")):
        run = list(group)
        there = (row for row in run if float(row["test_accuracy"] or 0) >= target)
        end = next(there, None)
        spent = {name: unit * float((end or run[-1])[name]) for name, unit in UNITS.items()}
        ends.setdefault(rule, []).append(Cost(**spent, missed=end is None))
    return {rule: Cost(*map(fmean, zip(*of_seeds, strict=True))) for rule, of_seeds in ends.items()}


def table(comparisons: Mapping[str, Costs]) -> str:
    """Return the Markdown table: a row for each rule, a column for each data set."""
    rules = dict.fromkeys(rule for found in comparisons.values() for rule in found)
    rows = [
        [rule, *(str(found[rule]) if rule in found else "-" for found in comparisons.values())]
        for rule in rules
    ]
    return grid(["rule", *comparisons], rows)


@styled
def draw(comparisons: Mapping[str, Costs], path: Path) -> None:
    """Draw rounds and megabytes as shares of FedAvg's: a line for each rule, a mark for each set.

    A triangle is a lower bound.
    """
    from matplotlib.figure import Figure

    def share(found: Costs, rule: str, name: str) -> float:
        return float(getattr(found[rule], name) / getattr(found[FIRST], name))

    rules = dict.fromkeys(rule for found in comparisons.values() for rule in found)
    del rules[FIRST]
    figure = Figure(figsize=(8.0, 0.26 * len(rules) + 1.0), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    for axes, (name, label) in zip(panels, {"round": "rounds", "bytes": "MB"}.items(), strict=True):
        axes.axvline(1.0, color="0.6")
        for (comparison, found), colour in zip(comparisons.items(), COLOURS, strict=False):
            for place, rule in enumerate(rules):
                if rule in found:
                    mark = ">" if found[rule].missed else "o"
                    axes.plot(share(found, rule, name), place, mark, color=colour, alpha=0.8)
            axes.plot([], [], "o", color=colour, label=comparison if name == "round" else None)
        axes.set_xscale("log")
        axes.set_xticks(SHARES, [f"{tick:g}" for tick in SHARES])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(f"{label} to the target, FedAvg = 1")
        axes.set_yticks(range(len(rules)), [_named(rule) for rule in rules])
        axes.set_ylim(len(rules) - 0.5, -0.5)
    figure.legend(loc="outside lower center", ncols=len(comparisons))
    save(figure, path)


def _named(rule: str) -> str:
    algorithm, *parts = rule.split("+")
    return ", ".join([title(algorithm), *parts])


def _two(number: float) -> str:
    """Return the number with two digits, or all that are before the point."""
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and draw the figure."""
    parser = Command("which", __doc__)
    parser.add_argument("folder", type=Path, help="that has a comparison in each of its folders")
    parser.add_argument("--output", type=Path, help="the folder in which the figure is written")
    args = parser.read(arguments)
    with parser.explained():
        folders = sorted(path.parent for path in args.folder.glob("*/curves.csv"))
        if not folders:
            raise ValueError(f"no comparison in the folders of {args.folder}")
        comparisons = {folder.name: costs(folder) for folder in folders}
        print(table(comparisons), end="")
        if args.output is not None:
            if lacking := [name for name, found in comparisons.items() if FIRST not in found]:
                raise ValueError(f"the figure has shares of {FIRST}'s, which {lacking} lack")
            args.output.mkdir(parents=True, exist_ok=True)
            draw(comparisons, args.output / "rounds-and-bytes.png")
            (args.output / "rounds-and-bytes.png").unlink()  # the page shows the vectors


if __name__ == "__main__":
    main()
