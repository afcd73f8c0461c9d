"""Several algorithms on the same data, splits and seeds: tables and figures.

    python -m simulations.lab.compare --dataset digits --partition shards --clients 50 \\
        --rounds 15 --algorithms fedavg,fedprox,fedadmm --seed 1 --engine in-process --output DIR

``--seeds 1,2,3`` runs each algorithm with several seeds. ``--tune-lr 0.01,0.1,1`` first chooses
each algorithm's learning rate on held-out training samples. After an interruption the same command
resumes: finished runs with the same settings are not run again.

DIR gets

``summary.json``   a list with one object per algorithm and seed
``table.md``       a row per algorithm, mean and standard deviation over seeds; also ``table.csv``
                   and ``table.json``
``curves.csv``     a row per algorithm, seed and round
``curves.png``     the curves, against rounds, bytes, seconds and virtual time; also ``.svg``
``tuning.md``      the rule, and the score of each learning rate; also ``.csv`` and ``.json``
``partition.png``  the samples of each class at each client (of the first seed); also ``.svg``
``report.html``    all of these in one file

and a results folder per run: ``ALGORITHM``, or ``ALGORITHM-seedN`` with several seeds, and
``tuning/ALGORITHM-lrX``. If clients evaluate, DIR also gets the files of
``simulations.lab.fairness``.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from clients import DirectoryStore
from fl_strategies import STRATEGIES
from fl_strategies.core.files import FolderLock, write_atomically
from fl_strategies.core.log import mute_below
from fl_strategies.parts import PARTS
from simulations.config import RunConfig
from simulations.experiment import prepare, run_in_process
from simulations.figures import draw_curves
from simulations.lab.cells import diverging_allowed, finished, interrupted, run_cells, trial
from simulations.lab.command_line import Command, numbers
from simulations.lab.fairness import fairness
from simulations.lab.report import write_report
from simulations.lab.superlink import check_one_machine, flwr_run, gpu_share, print_progress
from simulations.population import state_folder
from simulations.problems import draw_partition
from simulations.rules import configs_for
from simulations.tables import (
    RULE,
    algorithm_row,
    curve,
    markdown,
    score,
    tuned,
    tuning_markdown,
    write_csv,
    write_table,
)

ENGINES = ("in-process", "ray")
STATES = "state"
"""The folder of clients' states in a run's folder, on Ray."""


class Comparison:
    """The runs of ``configs``, one per algorithm, with each of ``seeds``; ``folder`` gets them.

    Parameters
    ----------
    configs : as :func:`configs_for` returns them
    folder : absolute path
    seeds : if empty, the seed of the configs
    rates : learning rates to choose from; if empty, those of the configs
    share : share in (0, 1) of each client's training samples that is held out for this choice
    engine : ``"in-process"``, or ``"ray"`` with its own ``workers`` processes
    verbose : leave Flower's log as it is, and show the rounds of the runs that choose the rates
    quiet : show only rounds with lost clients
    command : the command that the report names

    Raises
    ------
    ValueError
        For settings that cannot run, before any run.
    """

    def __init__(
        self,
        configs: Sequence[RunConfig],
        folder: Path,
        *,
        seeds: Sequence[int] = (),
        rates: Sequence[float] = (),
        share: float = 0.2,
        engine: str = "in-process",
        workers: int = 2,
        verbose: bool = False,
        quiet: bool = False,
        command: str = "",
    ) -> None:
        if len(rates) == 1:
            raise ValueError(f"tune-lr needs at least two rates, got {rates[0]}")
        if rates and not 0.0 < share < 1.0:
            raise ValueError(f"tune-share must be > 0 and < 1, got {share}")
        if rates and any(config.validation for config in configs):
            raise ValueError("tune-lr holds out training samples itself: leave out validation")
        self.configs, self.folder, self.rates, self.share = configs, folder, rates, share
        self.command = command
        self.seeds = seeds or [configs[0].seed]
        self.engine = engine
        self._run = partial(run_cell, engine=engine, workers=workers, verbose=verbose)
        if engine == "ray":
            check_one_machine()
        self.quiet, self.quiet_trials = quiet, quiet or not verbose
        for config in [*self.trials(), *self.runs()]:
            config.check()
            config.check_device()
            prepare(replace(config, state_dir="") if _makes_states(config) else config)

    def trials(self) -> list[RunConfig]:
        """Return the runs that choose the learning rates."""
        return [
            trial(
                self._placed(config, f"tuning/{config.rule}-lr{rate}"),
                rate,
                seed=self.seeds[0],
                share=self.share,
            )
            for config in self.configs
            for rate in self.rates
        ]

    def runs(self) -> list[RunConfig]:
        """Return the runs that are compared."""
        several = len(self.seeds) > 1
        return [
            replace(
                self._placed(config, config.rule + several * f"-seed{seed}"),
                seed=seed,
            )
            for config in self.configs
            for seed in self.seeds
        ]

    def run(self, jobs: int = 1) -> list[dict[str, Any]]:
        """Do the unfinished runs, ``jobs`` at a time, write all files, and return the summaries."""
        with FolderLock(self.folder).held("comparison"):
            return self._run_all(jobs)

    def _run_all(self, jobs: int) -> list[dict[str, Any]]:
        draw_partition(self.runs()[0], self.folder / "partition.png")
        if self.rates:
            trials = self.trials()
            run_cells(self._work(trials, self.quiet_trials), jobs=jobs, later=len(self.runs()))
            self._choose(trials)
        runs = self.runs()
        run_cells(self._work(runs, self.quiet), jobs=jobs, on_done=self.report)
        summaries = self.report()
        draw_curves([row for config in runs for row in curve(config)], self.folder / "curves.png")
        write_report(self.folder, runs, self.command)
        if self.configs[0].fraction_evaluate > 0.0:
            fairness({Path(c.output).name: Path(c.output) for c in runs}, self.folder)
        return summaries

    def report(self) -> list[dict[str, Any]]:
        """Write the tables of the finished runs; return their summaries."""
        done = [config for config in self.runs() if finished(config)]
        found = [
            json.loads((Path(config.output) / "summary.json").read_text())
            | {"seed": config.seed, "lr": config.lr}
            for config in done
        ]
        write_atomically(self.folder / "summary.json", json.dumps(found, indent=2).encode())
        rows = []
        for algorithm in dict.fromkeys(config.rule for config in done):
            mine = [n for n, config in enumerate(done) if config.rule == algorithm]
            rows.append(algorithm_row([done[n] for n in mine], [found[n] for n in mine]))
        ended = [
            f"{Path(config.output).name} ended early: {summary['given_up']}"
            for config, summary in zip(done, found, strict=True)
            if summary["given_up"]
        ]
        write_table(self.folder / "table", rows, markdown(rows) + self._notes(ended))
        write_csv(self.folder / "curves.csv", [row for config in done for row in curve(config)])
        return found

    def _choose(self, trials: Sequence[RunConfig]) -> None:
        scores: dict[str, dict[float, float]] = {}
        for tried in trials:
            scores.setdefault(tried.rule, {})[tried.lr] = score(tried)
        rows = [row for algorithm, mine in scores.items() for row in tuned(algorithm, mine)]
        text = tuning_markdown(rows, self._rule())
        write_table(self.folder / "tuning", rows, text)
        print(text, flush=True)
        chosen = {row["algorithm"]: row["lr"] for row in rows if row["chosen"]}
        self.configs = [replace(c, lr=chosen[c.rule]) for c in self.configs]

    def _rule(self) -> str:
        return RULE.format(seed=self.seeds[0], share=100 * self.share)

    def _notes(self, ended: Sequence[str]) -> str:
        """Return notes for a reader of the table, with the runs that ``ended`` early."""
        notes = [*ended]
        if len(self.seeds) > 1:
            seeds = ", ".join(str(seed) for seed in self.seeds)
            notes.append(f"Mean ± standard deviation over seeds {seeds}.")
        if self.rates:
            notes.append(f"{self._rule()} Scores: `tuning.md`.")
        return "".join(f"\n{note}\n" for note in notes)

    def _placed(self, config: RunConfig, name: str) -> RunConfig:
        """Return the config of a run in ``folder / name``, with its own client states."""
        folder, states = self.folder / name, config.state_dir
        if (
            self.engine == "ray" and config.stateful and not states
        ):  # `context.state` travels with every message
            states = str(folder / STATES)
        elif states and name != config.rule:
            states = str(Path(states) / name)
        return replace(config, output=str(folder), state_dir=states)

    def _work(self, runs: Sequence[RunConfig], quiet: bool) -> dict[RunConfig, Callable[[], None]]:
        return {config: partial(self._run, config, quiet=quiet) for config in runs}


def run_cell(
    config: RunConfig, *, engine: str, workers: int, verbose: bool, quiet: bool = False
) -> None:
    """Run one cell on ``engine``."""
    if not verbose:
        mute_below(logging.WARNING)
    if not config.resume:
        _drop_states(config)
    with diverging_allowed(config):
        if engine == "in-process":
            run_in_process(config, quiet=quiet)
            return
        flwr_run(
            config.to_run_config(),
            num_supernodes=min(workers, config.clients),
            gpus=gpu_share(workers, gpus) if (gpus := config.gpus()) else 0.0,
            workers=workers,
            on_line=print if verbose else partial(print_progress, quiet=quiet),
        )


def _drop_states(config: RunConfig) -> None:
    """Delete the states of the cell's former run, which is replaced; never another run's."""
    states = state_folder(config)
    if states is None:
        return
    lock = FolderLock(Path(config.output))
    former = lock.take()
    try:
        if _makes_states(config):
            shutil.rmtree(config.state_dir, ignore_errors=True)
        elif (owner := DirectoryStore.owner(states)) and owner.run == former:
            shutil.rmtree(states)
    finally:
        lock.release()


def _makes_states(config: RunConfig) -> bool:
    """Return whether the run makes its own states anew."""
    return config.state_dir == str(Path(config.output) / STATES)


def main(
    arguments: Sequence[str] | None = None, *, parser: Command | None = None
) -> list[dict[str, Any]]:
    """Compare from the command line; ``parser`` may be that of another command."""
    parser = parser or Command("compare", __doc__)
    known = ", ".join(sorted(STRATEGIES))
    about = f"names with commas, of {known}; with parts (fedprox+adam), of {', '.join(PARTS)}"
    parser.add_argument("--algorithms", required=True, metavar="NAME,NAME,...", help=about)
    about = "folder for the results"
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help=about)
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="in-process",
        help="one process (default), or Flower's simulation on Ray",
    )
    parser.add_argument("--workers", type=int, help="worker processes of Ray (2)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="in-process: runs at a time, one thread each (1)"
    )
    parser.add_argument(
        "--seeds", type=numbers(int), default=[], metavar="N,N,...", help="instead of --seed"
    )
    parser.add_argument(
        "--tune-lr",
        type=numbers(float),
        default=[],
        metavar="LR,LR,...",
        help="choose each algorithm's learning rate from these, on held-out training samples",
    )
    parser.add_argument(
        "--tune-share",
        type=float,
        help="share of each client's training samples held out for --tune-lr (0.2)",
    )
    parser.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a hyperparameter: rho=0.1, fedadmm.rho=0.1 or adam.lr=0.1; may be repeated",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show Flower's log, and the traceback of an error"
    )
    parser.add_argument("--quiet", action="store_true", help="print no line for each round")
    for key in fields(RunConfig):
        if key.name in ("algorithm", "params", "output"):
            continue
        flag, default = "--" + key.name.replace("_", "-"), getattr(RunConfig, key.name)
        about = key.metadata["about"]
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=None, help=about)
        else:
            shown = "" if default in ("", -1) else f" ({default})"
            parser.add_argument(flag, type=type(default), help=about + shown)
    args = parser.read(arguments)
    given = {
        key.name.replace("_", "-"): getattr(args, key.name)
        for key in fields(RunConfig)
        if getattr(args, key.name, None) is not None
    }
    del given["output"]
    folder: Path = args.output.expanduser().absolute()
    for one, other in (("seed", "seeds"), ("lr", "tune_lr")):
        if getattr(args, one) is not None and getattr(args, other):
            parser.error(f"either --{one} or --{other.replace('_', '-')}")
    for name, value in (("jobs", args.jobs), ("workers", args.workers)):
        if value is not None and value < 1:
            parser.error(f"--{name} must be >= 1, got {value}")
    if args.jobs > 1 and args.engine == "ray":
        parser.error("--jobs is for --engine in-process; Ray has --workers")
    if args.workers is not None and args.engine != "ray":
        parser.error("--workers is for --engine ray; in-process has --jobs")
    if args.tune_share is not None and not args.tune_lr:
        parser.error("--tune-share is for --tune-lr")
    names = args.algorithms.split(",")
    if "" in names:
        parser.error(f"--algorithms has an empty name, got {args.algorithms!r}")
    with parser.explained(verbose=args.verbose):
        comparison = Comparison(
            configs_for(names, args.param, given, folder),
            folder,
            seeds=args.seeds,
            rates=args.tune_lr,
            share=0.2 if args.tune_share is None else args.tune_share,
            engine=args.engine,
            workers=2 if args.workers is None else args.workers,
            verbose=args.verbose,
            quiet=args.quiet,
            command=parser.typed(arguments),
        )
        try:
            summaries = comparison.run(args.jobs)
        except KeyboardInterrupt:
            raise SystemExit(interrupted(folder)) from None
    print((folder / "table.md").read_text())
    print(f"results: {folder}")
    return summaries


if __name__ == "__main__":
    main()
