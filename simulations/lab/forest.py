"""The Board's figure: a line for each published number, ours with its interval next to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulations.figures import save, styled
from simulations.lab.verdicts import one_by_one

COLOURS = {"reproduced": "C2", "order only": "C0", "not": "C1"}
"""By verdict."""
PANELS = {"rounds_to_target": (1.0, "rounds to the target"), "": (100.0, "test accuracy (%)")}
"""Unit and name by figure; "": all others."""
Records = list[dict[str, Any]]


def lines(records: Records) -> Records:
    """Return the records that are a line: of the paper's rule, with published number and runs."""
    return [r for r in records if r["paper's"] and r["published"] is not None and r["interval"]]


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
            if one_by_one(record["figure"], record["values"]):
                last = max(record["values"]) if record["missed"] else None
                for value in record["values"]:
                    axes.plot(value, place, ">" if value == last else "o", color=colour)
            elif record["missed"]:  # the mean is a lower bound
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
    key = [("|", "black", "published"), ("o", "0.6", "ours, mean and 95 % interval, or each seed")]
    key += [("o", colour, verdict) for verdict, colour in COLOURS.items()]
    handles = [grid[0].plot([], [], m, color=c, label=text)[0] for m, c, text in key]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(key))
    save(figure, path)
