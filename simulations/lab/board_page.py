"""The board as it is written: ``board.json``, a page of tables, and a figure per setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from simulations.config import RunConfig
from simulations.figures import PANELS, draw_curves, save, styled, title
from simulations.lab.measured import KINDS, summary
from simulations.lab.studies import Setting
from simulations.lab.tuning import Search
from simulations.lab.verdicts import FEWEST, Interval, Judged, Row, each_seed, interval, one_by_one
from simulations.tables import AXES, FIGURES, curve, grid, run_figures


def records(board: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return the board as ``board.json`` holds it: an object per setting and rule."""
    return [
        {
            "setting": judged.setting.name,
            "where": judged.setting.where,
            "figure": judged.setting.figure,
            "rule": row.rule,
            "paper's": row.rule == judged.setting.ours,
            "published": _finite(row.published),
            "published not reached": row.published == math.inf,
            "values": list(row.values),
            "seeds": list(row.seeds),
            "interval": _ends(row.values),
            "prediction": _ends(row.values, of_next=True),
            "missed": _missed(judged.setting, row.values),
            "chosen": row.chosen,
            "tried": list(row.tried),
            "seconds": row.seconds,
            "ended early": list(row.ended),
            "best baseline": judged.best,
            "difference": judged.difference and [judged.difference.low, judged.difference.high],
            "verdict": judged.verdict,
            "not possible": judged.setting.impossible,
        }
        for judged in board
        for row in judged.rows
    ]


def _finite(value: float | None) -> float | None:
    """Return the value, None for one that JSON has no number for."""
    return None if value is None or math.isinf(value) else value


def _ends(values: Sequence[float], *, of_next: bool = False) -> list[float] | None:
    if len(values) < 2:
        return None
    ends = interval(values, of_next=of_next)
    return [ends.low, ends.high]


def markdown(board: Sequence[Judged], command: str) -> str:
    """Return a table per setting: published, ours, the interval; and the verdict below it.

    Settings with the same rules are side by side in one more table.
    """
    sections = [_section(judged, command) for judged in board]
    tables = [side_by_side(group) for group in alike(board) if len(group) > 1]
    return "\n".join([*sections, *("### Side by side\n\n" + table for table in tables)])


def _section(judged: Judged, command: str) -> str:
    setting = judged.setting
    title = f"### {setting.where}\n"
    if setting.impossible:
        return f"{title}\n*Not possible here:* {setting.impossible}.\n"
    less = f"difference of {setting.ours} to it (paired by seed)"
    heads = ["rule", "published", "ours", "95 % interval", less, "lr", "seeds", "core-hours"]
    heads = heads if setting.ours else [head for head in heads if head != less]
    rows = []
    for row in judged.rows:
        name = f"**{row.rule}**" if row.rule == setting.ours else row.rule
        about = ["-" if row.published is None else _published(setting, row.published)]
        if row.values:
            about.append(_mean_text(setting, row.values))
            about.append(_range(setting, row.values))
            about += [_less(judged, row)] if setting.ours else []
            about += [row.chosen, str(len(row.values)), f"{row.seconds / 3600:.2f}"]
        rows.append([name, *about, *["-"] * (len(heads) - 1 - len(about))])
    verdict = f"Verdict: *{judged.verdict}*."
    if judged.difference is not None and _has_gap(judged):
        gap = judged.difference
        mean, low, high = (_plain(setting, number) for number in (gap.mean, gap.low, gap.high))
        of = f"{setting.ours} to {judged.best} (paired by seed)"
        verdict += f" Difference of {of}: {mean} [{low}, {high}]."
    text = f"{title}\n{grid(heads, rows)}\n{verdict} `{command} --only {setting.name}`\n"
    notes = [f"{row.rule} ended early with {cause}" for row in judged.rows for cause in row.ended]
    if tried := [f"{row.rule} {', '.join(row.tried)}" for row in judged.rows if row.tried]:
        seed = (setting.tuned_by or setting).seeds[0]
        held_out = f"{100 * Search().share:g} % of each client's training samples, held out"
        notes.append(
            f"Hyperparameters are chosen with seed {seed} on {held_out}, from: {'; '.join(tried)}"
        )
    return text + "".join(f"\n{note}.\n" for note in notes)


def _less(judged: Judged, row: Row) -> str:
    """Return the difference of the paper's rule to the row's."""
    ours = next((one for one in judged.rows if one.rule == judged.setting.ours), row)
    seeds = len(judged.setting.seeds)
    if ours.rule == row.rule or seeds < 2 or not len(ours.values) == len(row.values) == seeds:
        return "-"
    if _missed(judged.setting, (*ours.values, *row.values)):
        return "-"
    gaps = [a - b for a, b in zip(ours.values, row.values, strict=True)]
    if one_by_one(judged.setting.figure, gaps):
        return ", ".join(f"{gap:+g}" for gap in gaps)
    return _plus_minus(judged.setting, interval(gaps))


def _range(setting: Setting, values: Sequence[float]) -> str:
    ends = _ends(values)
    if ends is None or _missed(setting, values) or one_by_one(setting.figure, values):
        return "-"
    low, high = (_plain(setting, end) for end in ends)
    return f"[{low}, {high}]"


def _missed(setting: Setting, values: Sequence[float]) -> int:
    """Return how many runs did not reach the target, which makes their mean a lower bound."""
    if setting.figure != "rounds_to_target":
        return 0
    return sum(value > setting.horizon for value in values)


def _has_gap(judged: Judged) -> bool:
    """Whether the compared pair's difference has an interval that is shown."""
    pair = [row.values for row in judged.rows if row.rule in (judged.setting.ours, judged.best)]
    setting = judged.setting
    return not any(_missed(setting, each) or one_by_one(setting.figure, each) for each in pair)


def _published(setting: Setting, value: float) -> str:
    if setting.figure == "rounds_to_target":
        return f"{value:g}" if math.isfinite(value) else "not reached"
    return _plain(setting, value)


def _mean_text(setting: Setting, values: Sequence[float]) -> str:
    missed = _missed(setting, values)
    if one_by_one(setting.figure, values):
        return ", ".join(each_seed(values, missed))
    if missed == len(values):
        return f"> {setting.horizon}"
    if missed:
        return f"> {fmean(values):.4g} ({len(values) - missed} of {len(values)} reached it)"
    if setting.figure == "rounds_to_target":
        return f"{fmean(values):.4g}"
    return _plain(setting, fmean(values))


def _plain(setting: Setting, value: float) -> str:
    _, unit, sign, _, form = KINDS[setting.figure]
    return f"{unit * value:{form}}{sign}"


# ---- several settings side by side ---------------------------------------------------------------


def side_by_side(board: Sequence[Judged]) -> str:
    """Return one table of settings with the same rules: a column each, mean ± half the interval.

    The learning rate, and what else was tuned, is in brackets. The last line is the difference of
    the paper's rule to the best baseline of the setting, paired by seed, with the verdict.
    """
    columns = [{row.rule: row for row in judged.rows} for judged in board]
    rows = [
        [
            rule,
            *(_mean(judged, column[rule]) for judged, column in zip(board, columns, strict=True)),
        ]
        for rule in board[0].setting.rules
    ]
    if any(judged.difference for judged in board):
        rows.append(["*difference*", *(_difference(judged) for judged in board)])
    heads = ["rule", *(judged.setting.name for judged in board)]
    return grid(heads, rows)


def _mean(judged: Judged, row: Row) -> str:
    if not row.values:
        return "-"
    lr = f" ({row.chosen})"
    alone = len(row.values) < 2 or one_by_one(judged.setting.figure, row.values)
    if alone or _missed(judged.setting, row.values):
        return f"{_mean_text(judged.setting, row.values)}{lr}"
    return _plus_minus(judged.setting, interval(row.values)) + lr


def _difference(judged: Judged) -> str:
    if judged.difference is None:
        return "-"
    if not _has_gap(judged):
        return f"to {judged.best}: *{judged.verdict}*"
    shown = _plus_minus(judged.setting, judged.difference)
    return f"{shown} to {judged.best}: *{judged.verdict}*"


def _plus_minus(setting: Setting, ends: Interval) -> str:
    _, unit, _, _, form = KINDS[setting.figure]
    return f"{unit * ends.mean:{form}} ± {unit * ends.half:{form}}"


def to_target(setting: Setting, runs: Sequence[tuple[str, RunConfig]]) -> str:
    """Return when each rule's runs reached the target, on the axes of the setting's ``curves``.

    Means over the seeds that reached it, with 95 % t intervals of five seeds or more; ``(2 of 3)``
    if not all did.
    """
    names = [name for name, column in AXES.items() if column in setting.curves]
    heads = [FIGURES[f"{n}_to_target"][0].format(target="the target") for n in names]
    reached: dict[str, list[dict[str, float | None]]] = {}
    for rule, config in runs:
        reached.setdefault(rule, []).append(run_figures(config, summary(config)))
    rows = [
        [rule, *(_reached([run[f"{name}_to_target"] for run in runs_of_rule]) for name in names)]
        for rule, runs_of_rule in reached.items()
    ]
    where = f"Target {100 * runs[0][1].target:g} %: {setting.where}" if runs else setting.where
    return f"### {where}\n\n{grid(['rule', *heads], rows)}"


def _reached(values: Sequence[float | None]) -> str:
    reached = [value for value in values if value is not None]
    if not reached:
        return "-"
    shown = f"{fmean(reached):.1f}"
    if len(reached) >= FEWEST:
        shown += f" ± {interval(reached).half:.1f}"
    return shown + f" ({len(reached)} of {len(values)})" * (len(reached) < len(values))


def alike(board: Sequence[Judged]) -> list[list[Judged]]:
    """Return the settings in groups with the same rules and figure, in their order."""
    groups: dict[tuple[str, ...], list[Judged]] = {}
    for judged in board:
        if judged.setting.impossible:
            continue
        groups.setdefault((judged.setting.figure, *judged.setting.rules), []).append(judged)
    return [*groups.values()]


# ---- figures -------------------------------------------------------------------------------------


@styled
def draw(judged: Judged, path: Path) -> None:
    """Draw each rule's mean with its 95 % interval, and the published number, to PNG and SVG.

    A setting of which less than two seeds have run has no interval and no figure.
    """
    rows = [row for row in judged.rows if len(row.values) > 1]
    if not rows:
        return
    from matplotlib.figure import Figure

    setting = judged.setting
    unit = KINDS[setting.figure].unit
    figure = Figure(figsize=(6.0, 0.32 * len(rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        ends = interval(row.values)
        colour = "C1" if row.rule == setting.ours else "C0"
        if one_by_one(setting.figure, row.values):
            axes.plot(row.values, [place] * len(row.values), "o", color=colour)
        else:
            axes.errorbar(unit * ends.mean, place, xerr=unit * ends.half, fmt="o", color=colour)
        if row.published is not None and math.isfinite(row.published):
            axes.plot(unit * row.published, place, "x", color="0.4")
    axes.set_yticks(range(len(rows)), [title(row.rule) for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel=KINDS[setting.figure].name)
    axes.set_title(setting.where)
    axes.grid(visible=False, axis="y")
    crosses = "; crosses: published" if setting.published else ""
    seeds = max(len(row.values) for row in rows)
    few = one_by_one(setting.figure, max((row.values for row in rows), key=len))
    what = f"Each of {seeds} seeds" if few else f"Means over {seeds} seeds, 95 % intervals"
    figure.supxlabel(f"{what}{crosses}.", fontsize="small")
    save(figure, path)


def draw_lines(board: Sequence[Judged], folder: Path) -> None:
    """Draw each figure of settings with a ``line``: the rules' means over it, with 95 % bands.

    Settings of which less than two seeds have run are left out.
    """
    figures: dict[str, list[Judged]] = {}
    for judged in board:
        if judged.setting.line and any(len(row.values) > 1 for row in judged.rows):
            figures.setdefault(judged.setting.line.figure, []).append(judged)
    for name, drawn in figures.items():
        _draw_lines(drawn, folder / f"{name}.png")


@styled
def _draw_lines(board: Sequence[Judged], path: Path) -> None:
    from matplotlib.figure import Figure

    setting = board[0].setting
    assert setting.line is not None
    unit = KINDS[setting.figure].unit
    figure = Figure(figsize=(5.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for rule in setting.rules:
        points = sorted(
            (judged.setting.line.at, interval(row.values))
            for judged in board
            for row in judged.rows
            if judged.setting.line and row.rule == rule and len(row.values) > 1
        )
        across = [at for at, _ in points]
        means = [unit * ends.mean for _, ends in points]
        lows = [unit * ends.low for _, ends in points]
        highs = [unit * ends.high for _, ends in points]
        width = 2.0 if rule == setting.ours else 1.2
        (line,) = axes.plot(across, means, marker=".", label=title(rule), linewidth=width)
        axes.fill_between(across, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0)
    places = sorted({judged.setting.line.at for judged in board if judged.setting.line})
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel(setting.line.axis)
    axes.set_ylabel(KINDS[setting.figure].name, fontsize="small")
    axes.set_title(setting.where.rpartition(",")[0])
    axes.legend()
    seeds = max(len(row.values) for judged in board for row in judged.rows)
    figure.supxlabel(f"Means over {seeds} seeds, 95 % intervals.", fontsize="small")
    save(figure, path)


def draw_runs(setting: Setting, runs: Sequence[tuple[str, RunConfig]], path: Path) -> None:
    """Draw the test accuracy of each rule's runs against the setting's ``curves``."""
    rows = [row | {"algorithm": rule} for rule, config in runs for row in curve(config)]
    panels = [p for x in setting.curves for p in PANELS if (p.x, p.ys) == (x, ("test_accuracy",))]
    draw_curves(rows, path, panels)
