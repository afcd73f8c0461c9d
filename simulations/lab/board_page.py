"""The board as it is written: ``board.json``, a page of tables, and a figure per setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from simulations.figures import save, title
from simulations.lab.board import FEWER_IS_BETTER, Judged, Setting, interval
from simulations.tables import grid

NAMES = {
    "rounds_to_target": "rounds to the target",
    "final_accuracy": "final test accuracy (%)",
    "late_accuracy": "test accuracy, mean of the last ten tests (%)",
    "own_accuracy": "accuracy on clients' own test samples (%)",
}
"""What a setting's figure is called."""


def records(board: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return the board as ``board.json`` holds it: an object per setting and rule."""
    return [
        {
            "setting": each.setting.name,
            "where": each.setting.where,
            "figure": each.setting.figure,
            "rule": row.rule,
            "published": row.published,
            "values": list(row.values),
            "lr": row.lr,
            "seconds": row.seconds,
            "best baseline": each.best,
            "difference": None if each.difference is None else list(each.difference),
            "verdict": each.verdict,
        }
        for each in board
        for row in each.rows
    ]


def markdown(board: Sequence[Judged], command: str) -> str:
    """Return a table per setting: published, ours, the interval; and the verdict below it."""
    return "\n".join(_section(each, command) for each in board)


def _section(each: Judged, command: str) -> str:
    setting = each.setting
    title = f"### {setting.where}\n"
    if setting.impossible:
        return f"{title}\n*Not possible here:* {setting.impossible}.\n"
    heads = ["rule", "published", "ours", "95 % interval", "lr", "seeds", "core-hours"]
    rows = []
    for row in each.rows:
        name = f"**{row.rule}**" if row.rule == setting.ours else row.rule
        about = ["-" if row.published is None else _told(setting, row.published)]
        if row.values:
            about.append(_told(setting, fmean(row.values)))
            about.append(_range(setting, row.values))
            about += [f"{row.lr:g}", str(len(row.values)), f"{row.seconds / 3600:.2f}"]
        rows.append([name, *about, *["-"] * (len(heads) - 1 - len(about))])
    verdict = f"Verdict: *{each.verdict}*."
    if each.difference is not None:
        low, high = each.difference.low, each.difference.high
        verdict += (
            f" {setting.ours} less {each.best}, in pairs: {_plain(setting, each.difference.mean)}"
            f" [{_plain(setting, low)}, {_plain(setting, high)}]."
        )
    run_it = f"`{command} --only {setting.name}`"
    return f"{title}\n{grid(heads, rows)}\n{verdict} {run_it}\n"


def _range(setting: Setting, values: Sequence[float]) -> str:
    if len(values) < 2:
        return "-"
    found = interval(values)
    return f"[{_plain(setting, found.low)}, {_plain(setting, found.high)}]"


def _told(setting: Setting, value: float) -> str:
    if setting.figure in FEWER_IS_BETTER:
        return f"> {setting.horizon}" if value > setting.horizon else f"{value:.4g}"
    return f"{100 * value:.1f} %"


def _plain(setting: Setting, value: float) -> str:
    return f"{value:.1f}" if setting.figure in FEWER_IS_BETTER else f"{100 * value:.1f} %"


def draw(each: Judged, path: Path) -> None:
    """Draw each rule's mean with its 95 % interval, and the published number, to PNG and SVG.

    A setting of which less than two seeds have run has no interval and no figure.
    """
    rows = [row for row in each.rows if len(row.values) > 1]
    if not rows:
        return
    from matplotlib.figure import Figure

    setting = each.setting
    unit = 1.0 if setting.figure in FEWER_IS_BETTER else 100.0
    figure = Figure(figsize=(6.0, 0.32 * len(rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        found = interval(row.values)
        colour = "C3" if row.rule == setting.ours else "C0"
        axes.errorbar(unit * found.mean, place, xerr=unit * found.half, fmt="o", color=colour)
        if row.published is not None:
            axes.plot(unit * row.published, place, "x", color="0.4")
    axes.set_yticks(range(len(rows)), [title(row.rule) for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel=NAMES[setting.figure])
    axes.set_title(setting.where, fontsize="medium")
    axes.grid(axis="x", alpha=0.3)
    crosses = "; crosses: published" if setting.published else ""
    seeds = max(len(row.values) for row in rows)
    figure.supxlabel(f"Means over {seeds} seeds, 95 % intervals{crosses}.", fontsize="small")
    save(figure, path)
