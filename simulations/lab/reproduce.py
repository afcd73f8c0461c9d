"""Studies: many runs from one command, whose table is committed.

    python -m simulations.lab.reproduce STUDY --output DIR [--jobs 2] [--only TEXT] [--rules A,B]

A study is a list of settings, ``studies/STUDY.toml`` (``simulations.lab.studies``). Their numbers
stand next to the published ones, with intervals over seeds and a verdict. A run that is finished
under DIR, with the same settings, is not made again: an interrupted command can be repeated.
After every run ``DIR/board.md`` and ``DIR/board.json`` are written anew, with the settings that are
chosen or have runs under DIR; each chosen one gets a figure. A run ends at its number of rounds, at
its target, or when all its clients diverge.
``--quick`` makes two rounds of two settings with a small model, to show that the study still runs;
it writes under ``DIR/quick``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from fl_strategies.core.files import FolderLock, write_atomically
from simulations.config import RunConfig
from simulations.folders import writable
from simulations.lab import board, board_page
from simulations.lab.command_line import Command
from simulations.lab.runs import interrupted
from simulations.lab.studies import STUDIES, Setting, load


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a study from the command line."""
    parser = Command("reproduce", __doc__)
    parser.add_argument("study", choices=STUDIES, help="the study")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each (1)")
    parser.add_argument("--only", default="", help="run only settings with this in their name")
    parser.add_argument("--rules", default="", help="run only these rules: a,b")
    parser.add_argument("--quiet", action="store_true", help="print no line for each round")
    parser.add_argument(
        "--quick", action="store_true", help="tiny runs, to try the study, under quick/"
    )
    args = parser.read(arguments)
    folder: Path = args.output.expanduser().absolute() / ("quick" * args.quick)
    with parser.explained():
        writable(folder, "results folder")
        try:
            with FolderLock(folder).held("study"):
                text = run_settings(args, folder)
        except KeyboardInterrupt:
            raise SystemExit(interrupted(folder)) from None
    print(text)


def run_settings(args: argparse.Namespace, folder: Path) -> str:
    """Run the settings of the board that ``--only`` chooses; return the study's part of it."""
    settings = load(args.study)
    if args.quick:
        settings = [board.shrunk(setting) for setting in chosen(settings, args.only)[:2]]
    options = f"{' --quick' * args.quick} --output {args.output}"
    command = f"python -m simulations.lab.reproduce {args.study}{options}"

    judged = {setting.name: board.judged(setting, folder, settings) for setting in settings}
    wanted = chosen(settings, args.only)

    def runs_of(setting: Setting) -> list[tuple[str, RunConfig]]:
        return board.experiment(setting, folder).finished_runs()

    def write_board() -> str:
        results = [one for one in judged.values() if one.setting in wanted or one.ran]
        tables = [
            board_page.to_target(result.setting, runs_of(result.setting))
            for result in results
            if result.setting.curves
        ]
        text = "\n".join([board_page.markdown(results, command), *tables])
        write_atomically(folder / "board.md", text.encode())
        write_atomically(
            folder / "board.json", json.dumps(board_page.records(results), indent=2).encode()
        )
        return text

    def note(setting: Setting) -> None:
        judged[setting.name] = board.judged(setting, folder, settings)
        write_board()

    rules = [rule for rule in args.rules.split(",") if rule]
    board.run(wanted, folder, rules=rules, jobs=args.jobs, quiet=args.quiet, on_done=note)
    # some share their runs
    judged |= {one.name: board.judged(one, folder, settings) for one in settings}
    for setting in wanted:
        board_page.draw(judged[setting.name], folder / f"{setting.name}.png")
        if setting.curves and (made := runs_of(setting)):
            board_page.draw_runs(setting, made, folder / f"{setting.name}-curves.png")
    board_page.draw_lines([*judged.values()], folder)
    return write_board()


def chosen(settings: Sequence[Setting], text: str) -> list[Setting]:
    """Return those whose name has the text; ``ValueError`` if none has."""
    matching = [setting for setting in settings if text in setting.name]
    if not matching:
        names = ", ".join(setting.name for setting in settings)
        raise ValueError(f"--only {text!r} is in no setting's name; settings: {names}")
    return matching


if __name__ == "__main__":
    main()
