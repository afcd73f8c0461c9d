"""The Board's figure: a line for each published number, ours with its interval next to it.

    python -m simulations.lab.forest --add DIR

puts what ``reproduce`` has written into ``DIR/board.json`` in the place of the same settings of
``notebooks/pages/board.json``, and draws ``notebooks/pages/board.svg`` of all of them. Without
``--add`` it draws alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_strategies.core.files import write_atomically
from simulations.figures import save, styled
from simulations.lab.command_line import Command
from simulations.lab.front import PAGES

COLOURS = {"reproduced": "C2", "order only": "C0", "not": "C1"}
"""By verdict."""
PANELS = {"rounds_to_target": (1.0, "rounds to the target"), "": (100.0, "test accuracy (%)")}
"""Unit and name by figure; "": all others."""
Records = list[dict[str, Any]]


def lines(records: Records) -> Records:
    """Return the records that are a line: of the paper's rule, with published number and runs."""
    return [r for r in records if r["paper's"] and r["published"] is not None and r["interval"]]


def merged(records: Records, new: Records) -> Records:
    """Return the records, with the ``new`` ones in the place of those of the same settings."""
    replaced = {record["setting"] for record in new}
    return [record for record in records if record["setting"] not in replaced] + new


@styled
def draw(records: Records, path: Path) -> None:
    """Draw the ``lines``: accuracies above, rounds below."""
    from matplotlib.figure import Figure

    panels: dict[str, Records] = {}
    for record in lines(records):
        name = record["figure"] if record["figure"] in PANELS else ""
        panels.setdefault(name, []).append(record)
    names = sorted(panels)
    heights = [len(panels[name]) + 1 for name in names]
    figure = Figure(figsize=(9.0, 0.24 * sum(heights) + 0.9), layout="constrained")
    grid = figure.subplots(len(names), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, name in zip(grid, names, strict=True):
        unit, label = PANELS[name]
        for place, record in enumerate(panels[name]):
            low, high = (unit * end for end in record["interval"])
            middle, colour = (low + high) / 2, COLOURS.get(record["verdict"], "0.6")
            if record["missed"]:  # the mean is a lower bound
                axes.plot(middle, place, ">", color=colour)
            else:
                axes.errorbar(middle, place, xerr=middle - low, fmt="o", color=colour)
            axes.plot(unit * record["published"], place, "|", color="black", markersize=11)
        names_of_lines = [record["where"] for record in panels[name]]
        axes.set_yticks(range(len(names_of_lines)), names_of_lines, fontsize="small")
        axes.set_ylim(len(panels[name]) - 0.5, -0.5)
        axes.set_xlabel(label)
        axes.grid(visible=False, axis="y")
        if name:
            axes.set_xlim(left=0.0)
        else:
            axes.set_xlim(right=100.0)
    key = [("|", "black", "published"), ("o", "0.6", "ours, mean and 95 % interval")]
    key += [("o", colour, verdict) for verdict, colour in COLOURS.items()]
    handles = [grid[0].plot([], [], m, color=c, label=text)[0] for m, c, text in key]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(key))
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the figure, and the records if some are added."""
    parser = Command("forest", __doc__)
    parser.add_argument("--add", type=Path, help="folder of a study, whose settings are put in")
    parser.add_argument("--output", type=Path, default=PAGES, help="folder of both files")
    args = parser.read(arguments)
    with parser.explained():
        records = json.loads((PAGES / "board.json").read_text())
        if args.add is not None:
            new = json.loads((args.add / "board.json").read_text())
            records = merged(records, [record for record in new if record["values"]])
            text = json.dumps(records, indent=1)
            write_atomically(args.output / "board.json", f"{text}\n".encode())
        draw(records, args.output / "board.png")
        (args.output / "board.png").unlink()  # the page shows the vectors
        print(f"{len(lines(records))} lines: {args.output / 'board.svg'}")


if __name__ == "__main__":
    main()
