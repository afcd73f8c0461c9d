"""Studies: many runs from one command, whose table is committed.

    python -m simulations.lab.reproduce STUDY --output DIR [--jobs 2] [--only TEXT] [--rules A,B]

A study is a list of cells, each one run, or of settings of the board, whose numbers stand beside
the published ones, with intervals over seeds and a verdict. A run that is finished under DIR, with
the same settings, is not made again, so that an interrupted command can be repeated. After every
run ``DIR/table.md``, or ``DIR/board.md`` and ``DIR/board.json``, is written anew; each setting of
the board gets a figure. A run ends at its number of rounds, at its target, when all its clients
diverge, or after a number of rounds without a new best accuracy. ``--quick`` makes two rounds of
two cells or settings with a small model, to show that the study still runs; it writes under
``DIR/quick``.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fl_strategies import EarlyStop, RoundInfo
from fl_strategies.core.files import FolderLock, write_atomically
from fl_strategies.core.log import mute_below
from simulations.experiment import run_in_process
from simulations.figures import read_history
from simulations.lab import board, board_page
from simulations.lab.cells import diverging_allowed, interrupted, run_cells
from simulations.lab.command_line import Command
from simulations.lab.published import BOARD
from simulations.lab.settings import Setting
from simulations.lab.studies import FEDBC_RULES, STUDIES, Cell
from simulations.results import writable
from simulations.tables import grid

N = TypeVar("N", Cell, Setting)


def diverged(info: RoundInfo) -> bool:
    """Give a cell up when no client's reply was finite in a round."""
    return info.metrics["clients-used"] == 0


def run_cell(cell: Cell, folder: Path, *, quiet: bool = False) -> None:
    """Run one cell."""
    mute_below(logging.ERROR)
    patience = [EarlyStop(patience=cell.patience)] if cell.patience else []
    config = cell.settings(folder)
    with diverging_allowed(config):
        run_in_process(config, [diverged, *patience], quiet=quiet)


def table(cells: list[Cell], folder: Path) -> str:
    """Return the cells' results as a Markdown table."""
    marks = max((cell.marks for cell in cells), default=())
    names = [f"accuracy at {t}" for t in marks] + ["own accuracy", "virtual s"] * bool(marks)
    heads = ["cell", "rounds to target", "best accuracy", "after rounds", "‖∇f‖²", *names]
    rows = []
    for cell in cells:
        if (summary := _finished(folder / cell.name)) is not None:
            to_target = summary["rounds_to_target"] or "-"
            best = math.nan if summary["best_accuracy"] is None else 100 * summary["best_accuracy"]
            norm2 = summary.get("gradient_norm2")
            gradient = "-" if norm2 is None else f"{norm2:.1e}"
            row = [cell.name, str(to_target), f"{best:.2f} %", str(summary["rounds"]), gradient]
            if marks:
                history = read_history(folder / cell.name / "history.jsonl")
                at = {int(entry["round"]): entry for entry in history}
                shown = [at[t]["test-accuracy"] if t in at else math.nan for t in marks]
                last = at.get(summary["rounds"], {})
                shown.append(last.get("own-accuracy", last.get("eval-accuracy", math.nan)))
                row += [f"{100 * share:.2f} %" for share in shown]
                row.append(f"{last.get('virtual-seconds', math.nan):.0f}")
            rows.append(row)
    return grid(heads, rows)


def fedadmm_table(cells: list[Cell], folder: Path) -> str:
    """Return a table per partition: a row per rule, network and seed, a column per step size.

    An entry is the rounds to the target, else the best accuracy and after how many rounds it ended.
    """
    found: dict[str, dict[tuple[str, str, str], dict[str, str]]] = {}
    for cell in cells:
        config = cell.config
        rule, _, _ = cell.name.partition(f"-{config['partition']}-")
        row = (rule, f"`{config['model']}`", str(config["seed"]))
        step = f"momentum {config['momentum']:g}, lr {config['lr']:g}"
        rows = found.setdefault(config["partition"], {})
        rows.setdefault(row, {})[step] = _to_target(folder / cell.name)
    tables = []
    for partition, rows in found.items():
        steps = list(dict.fromkeys(step for row in rows.values() for step in row))
        heads = ["rule", "network", "seed", *steps]
        shown = [[*row, *(each.get(step, "") for step in steps)] for row, each in rows.items()]
        tables.append(f"{partition}:\n\n{grid(heads, shown)}")
    return "\n".join(tables)


def _finished(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a cell's run; None as long as it is not finished."""
    path = folder / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return summary if summary.get("finished") else None


def _to_target(folder: Path) -> str:
    summary = _finished(folder)
    if summary is None:
        return "not run"
    if summary["rounds_to_target"] is not None:
        return f"**{summary['rounds_to_target']}**"
    last = read_history(folder / "history.jsonl")[-1]
    if last["clients-used"] == 0:
        return f"diverged in round {summary['rounds']}"
    return f"{100 * summary['best_accuracy']:.1f} % ({summary['rounds']})"


FEDBC_FIGURES = {
    "test-accuracy": "accuracy",
    "eval-accuracy-variance": "variance over clients",
    "eval-accuracy-smallest": "smallest client",
    "eval-accuracy-largest": "largest client",
    "own-accuracy-mean": "personalized models",
    "weight-share-smallest": "smallest's weight",
    "weight-share-largest": "largest's weight",
}

LAST = 10
"""Last rounds of a run that ``fedbc_table`` averages: partial participation is noisy."""


def fedbc_table(cells: list[Cell], folder: Path) -> str:
    """Return a row per rule, E and data set, at the rule's best rate on data set 0 with seed 1.

    Figures are means over the last ten rounds, then mean and standard deviation over seeds.
    """
    found: dict[tuple[str, int, int], dict[float, list[dict[str, float]]]] = {}
    for cell in cells:
        if _finished(folder / cell.name) is not None:
            rows = read_history(folder / cell.name / "history.jsonl")[-LAST:]
            figures = {n: _mean_of_rows(rows, n) for n in FEDBC_FIGURES}
            rule, *_ = cell.name.partition("-E")
            data = int(cell.config["dataset-params"][-1])
            key = (rule, cell.config["epochs"], data)
            found.setdefault(key, {}).setdefault(cell.config["lr"], []).append(figures)
    heads = ["E", "data set", "rule", "lr", *FEDBC_FIGURES.values(), "seeds"]
    rows_shown = []
    for epochs in (1, 5):
        for data in (0, 1, 2):
            for rule in FEDBC_RULES:
                tuned = found.get((rule, epochs, 0), {})
                if not tuned:
                    continue
                lr = max(tuned, key=lambda rate: tuned[rate][0]["test-accuracy"])
                runs = found.get((rule, epochs, data), {}).get(lr, [])
                if runs:
                    shown = [_mean_and_deviation([r[name] for r in runs]) for name in FEDBC_FIGURES]
                    about = [str(epochs), str(data), rule, f"{lr:g}"]
                    rows_shown.append([*about, *shown, str(len(runs))])
    return grid(heads, rows_shown)


def _mean_of_rows(rows: list[dict[str, float]], name: str) -> float:
    """Return the mean of a column; NaN where a row lacks it or has null."""
    values = [row.get(name) for row in rows]
    return sum(math.nan if value is None else value for value in values) / len(rows)


def _mean_and_deviation(values: list[float]) -> str:
    if math.isnan(values[0]):
        return "-"
    mean = f"{100 * statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def delta_sgd_table(cells: list[Cell], folder: Path) -> str:
    """Return a row per solver and number of rounds, with its accuracy for each alpha."""
    rows: dict[tuple[str, int], list[str]] = {}
    alphas = dict.fromkeys(cell.name.partition("-alpha")[2] for cell in cells)
    for cell in cells:  # by alpha, so that a row gets its columns in order
        name, _, _ = cell.name.partition("-alpha")
        for rounds in sorted({min(100, cell.config["rounds"]), cell.config["rounds"]}):
            shown = _accuracy_after(rounds, folder / cell.name / "history.jsonl")
            rows.setdefault((name, rounds), []).append(shown)
    heads = ["solver", "rounds", *(f"alpha {alpha}" for alpha in alphas)]
    return grid(heads, [[name, str(n), *shown] for (name, n), shown in rows.items()])


def _accuracy_after(rounds: int, path: Path) -> str:
    """Return the test accuracy after so many rounds, and the best till then."""
    rows = read_history(path)[:rounds] if path.exists() else []
    if useless := [row["round"] for row in rows if row["clients-used"] == 0]:
        return f"diverged in round {useless[0]}"
    if len(rows) < rounds:
        return "not run"
    tested = [row["test-accuracy"] for row in rows if "test-accuracy" in row]
    return f"{100 * tested[-1]:.1f} % (best {100 * max(tested):.1f} %)"


TABLES: dict[str, Callable[[list[Cell], Path], str]] = {
    "delta-sgd-mnist": delta_sgd_table,
    "fedadmm-mnist": fedadmm_table,
    "fedbc-synthetic": fedbc_table,
}
"""Tables of studies for which a row per cell would not do."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a study from the command line."""
    parser = Command("reproduce", __doc__)
    parser.add_argument("study", choices=sorted([*STUDIES, *BOARD]), help="the study")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, one thread each (1)")
    parser.add_argument("--only", default="", help="run only cells with this in their name")
    parser.add_argument("--rules", default="", help="run only these rules of the board: a,b")
    parser.add_argument("--quiet", action="store_true", help="print no line for each round")
    parser.add_argument(
        "--quick", action="store_true", help="tiny runs, to try the study, under quick/"
    )
    args = parser.read(arguments)
    folder: Path = args.output.expanduser().absolute() / ("quick" * args.quick)
    mute_below(logging.ERROR)
    with parser.explained():
        writable(folder, "results folder")
        try:
            with FolderLock(folder).held("study"):
                text = (run_settings if args.study in BOARD else run_study)(args, folder)
        except KeyboardInterrupt:
            raise SystemExit(interrupted(folder)) from None
    print(text)


def run_study(args: argparse.Namespace, folder: Path) -> str:
    """Run the cells of a study that ``--only`` chooses; return the study's table."""
    if args.rules:
        raise ValueError(
            f"--rules {args.rules} is of the board, {', '.join(BOARD)}, got {args.study}"
        )
    cells = STUDIES[args.study]()
    wanted = chosen(cells, args.only)
    if args.quick:
        cells = wanted = [cell.shrunk() for cell in wanted[:2]]
    make_table = TABLES.get(args.study, table)

    def write_table() -> None:
        write_atomically(folder / "table.md", make_table(cells, folder).encode())

    work = {
        cell.settings(folder): partial(run_cell, cell, folder, quiet=args.quiet) for cell in wanted
    }
    run_cells(work, jobs=args.jobs, on_done=write_table)
    return make_table(cells, folder)


def run_settings(args: argparse.Namespace, folder: Path) -> str:
    """Run the settings of the board that ``--only`` chooses; return the study's part of it."""
    settings = BOARD[args.study]
    if args.quick:
        settings = [board.shrunk(setting) for setting in chosen(settings, args.only)[:2]]
    options = f"{' --quick' * args.quick} --output {args.output}"
    command = f"python -m simulations.lab.reproduce {args.study}{options}"

    judged = {setting.name: board.found(setting, folder, settings) for setting in settings}

    def write_board() -> str:
        found = [*judged.values()]
        tables = [
            board_page.to_target(each.setting, board.finished_runs(each.setting, folder))
            for each in found
            if each.setting.curves
        ]
        text = "\n".join([board_page.markdown(found, command), *tables])
        write_atomically(folder / "board.md", text.encode())
        write_atomically(
            folder / "board.json", json.dumps(board_page.records(found), indent=2).encode()
        )
        return text

    def note(setting: Setting) -> None:
        judged[setting.name] = board.found(setting, folder, settings)
        write_board()

    wanted = chosen(settings, args.only)
    rules = [rule for rule in args.rules.split(",") if rule]
    board.run(wanted, folder, rules=rules, jobs=args.jobs, quiet=args.quiet, on_done=note)
    # some share their runs
    judged |= {one.name: board.found(one, folder, settings) for one in settings}
    for setting in wanted:
        board_page.draw(judged[setting.name], folder / f"{setting.name}.png")
        if setting.curves and (made := board.finished_runs(setting, folder)):
            board_page.draw_runs(setting, made, folder / f"{setting.name}-curves.png")
    board_page.draw_lines([*judged.values()], folder)
    return write_board()


def chosen(named: Sequence[N], text: str) -> list[N]:
    """Return those whose name has the text; ``ValueError`` if none has."""
    found = [one for one in named if text in one.name]
    if not found:
        names = ", ".join(one.name for one in named)
        raise ValueError(f"--only {text!r} is in no cell's name; cells: {names}")
    return found


if __name__ == "__main__":
    main()
