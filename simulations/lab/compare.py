"""Several algorithms on the same data, splits and seeds: tables and figures.

    python -m simulations.lab.compare --dataset digits --partition shards --clients 50 \\
        --rounds 15 --algorithms fedavg,fedprox,fedadmm --seed 1 --engine in-process --output DIR

``--seeds 1,2,3`` runs each algorithm with several seeds. ``--tune lr=0.01,0.1,1`` first chooses
each algorithm's learning rate on held-out training samples; so does ``--tune`` with any other
hyperparameter or setting of local training, and with several. After an interruption the same
command resumes: finished runs with the same settings are not run again.

DIR gets

``summary.json``   a list with one object per algorithm and seed
``table.md``       a row per algorithm, mean and standard deviation over seeds; also ``table.csv``
                   and ``table.json``
``curves.csv``     a row per algorithm, seed and round
``curves.png``     the curves, against rounds, bytes, seconds and virtual time; also ``.svg``
``tuning.md``      the rule, and the score of each trial; also ``.csv`` and ``.json``
``partition.png``  the samples of each class at each client (of the first seed); also ``.svg``
``report.html``    all of these in one file

and a results folder per run: ``ALGORITHM``, or ``ALGORITHM-seedN`` with several seeds, and
``tuning/ALGORITHM-lrX`` for each trial.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from fl_strategies import STRATEGIES
from fl_strategies.core.files import FolderLock, write_atomically
from fl_strategies.parts import PARTS
from simulations.config import UNSET, RunConfig
from simulations.experiment import prepare
from simulations.figures import draw_curves
from simulations.lab.command_line import Command, imported, numbers
from simulations.lab.experiments import Experiment
from simulations.lab.report import write_report
from simulations.lab.runs import ENGINES, STATES, finished, interrupted, makes_states, run_one
from simulations.lab.superlink import check_one_machine
from simulations.lab.tuners import TUNERS, Space, points, remark
from simulations.lab.tuning import Search, rule_of, spaces, tuning_markdown, tuning_rows
from simulations.problems import draw_partition
from simulations.rules import configs_for
from simulations.tables import algorithm_row, curve, markdown, write_csv, write_table


class Comparison:
    """The runs of ``configs``, one per algorithm, with each of ``seeds``; ``folder`` gets them.

    Parameters
    ----------
    configs : as :func:`configs_for` returns them
    folder : absolute path
    seeds : if empty, the seed of the configs
    tune : what each algorithm chooses from (:func:`simulations.lab.tuning.spaces`), if anything
    trials : trials of each algorithm; 0: as many as the largest grid has points
    tuner : one of ``TUNERS``
    share : share in (0, 1) of each client's training samples that is held out for this choice
    tune_by : ``"accuracy"`` of the global model, or ``"own-accuracy"`` of the personalized models
    engine : ``"in-process"`` or ``"ray"``
    workers : processes of a run in which clients train; 0: as many as ``ENGINES`` says
    verbose : leave Flower's log as it is, and show the rounds of the trials
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
        tune: Mapping[str, Space] | None = None,
        trials: int = 0,
        tuner: str = "grid",
        share: float = 0.2,
        tune_by: str = "accuracy",
        engine: str = "in-process",
        workers: int = 0,
        verbose: bool = False,
        quiet: bool = False,
        command: str = "",
    ) -> None:
        tune = {algorithm: space for algorithm, space in (tune or {}).items() if space}
        if tune and not 0.0 < share < 1.0:
            raise ValueError(f"tune-share must be > 0 and < 1, got {share}")
        if tune and any(config.validation for config in configs):
            raise ValueError("tune holds out training samples itself: leave out validation")
        if tune_by == "own-accuracy" and not all(c.fraction_evaluate for c in configs):
            raise ValueError("tune-by own-accuracy needs clients that test: fraction-evaluate > 0")
        self.configs = {config.rule: config for config in configs}
        self.folder, self.command, self.engine = folder, command, engine
        self.seeds = seeds or [configs[0].seed]
        self._run = partial(run_one, engine=engine, workers=workers, verbose=verbose)
        if engine == "ray":
            check_one_machine()
        self.quiet, self.quiet_trials = quiet, quiet or not verbose
        rules = {algorithm: tune.get(algorithm, {}) for algorithm in self.configs}
        self.experiment = Experiment(
            rules,
            place=self._placed,
            name=lambda algorithm, seed: algorithm + f"-seed{seed}" * (len(self.seeds) > 1),
            seeds=self.seeds,
            search=Search(
                tuner, trials or max(len(points(space)) for space in rules.values()),
                self.seeds[0], share, own=tune_by == "own-accuracy",
            ),
        )  # fmt: skip
        for config in [*self.experiment.waiting(), *self.runs()]:
            config.check()
            config.check_device()
            prepare(replace(config, state_dir="") if makes_states(config) else config)

    def runs(self) -> list[RunConfig]:
        """Return the runs that are compared, of the algorithms whose choice is made."""
        made = self.experiment.runs()
        order = [(algorithm, seed) for algorithm in self.configs for seed in self.seeds]
        return [made[key] for key in order if key in made]

    def run(self, jobs: int = 1) -> list[dict[str, Any]]:
        """Do the unfinished runs, ``jobs`` at a time, write all files, and return the summaries."""
        with FolderLock(self.folder).held("comparison"):
            first = replace(next(iter(self.configs.values())), seed=self.seeds[0])
            draw_partition(first, self.folder / "partition.png")
            self.experiment.run(
                self._task, jobs=jobs, on_trials=self._report_trials, on_done=self.report
            )
            summaries, runs = self.report(), self.runs()
            rows = [row for config in runs for row in curve(config)]
            draw_curves(rows, self.folder / "curves.png")
            write_report(self.folder, runs, self.command)
        return summaries

    def report(self) -> list[dict[str, Any]]:
        """Write the tables of the finished runs; return their summaries."""
        done = [config for config in self.runs() if finished(config)]
        summaries = [
            json.loads((Path(config.output) / "summary.json").read_text())
            | {"seed": config.seed, "lr": config.lr}
            for config in done
        ]
        write_atomically(self.folder / "summary.json", json.dumps(summaries, indent=2).encode())
        rows = []
        for algorithm in dict.fromkeys(config.rule for config in done):
            places = [n for n, config in enumerate(done) if config.rule == algorithm]
            rows.append(algorithm_row([done[n] for n in places], [summaries[n] for n in places]))
        ended = [
            f"{Path(config.output).name} ended early: {summary['given_up']}"
            for config, summary in zip(done, summaries, strict=True)
            if summary["given_up"]
        ]
        write_table(self.folder / "table", rows, markdown(rows) + self._notes(ended))
        write_csv(self.folder / "curves.csv", [row for config in done for row in curve(config)])
        return summaries

    def _report_trials(self) -> None:
        """Write the table of all trials; without trials remove that of an earlier comparison."""
        if not self.experiment.tunings:
            for ending in ("md", "csv", "json"):
                (self.folder / f"tuning.{ending}").unlink(missing_ok=True)
            return
        spaces = [tuning.domain.values for tuning in self.experiment.tunings.values()]
        names = list(dict.fromkeys(name for space in spaces for name in space))
        rows = [
            row
            for algorithm, tried in self.experiment.tried().items()
            if tried
            for row in tuning_rows(self.experiment.tunings[algorithm], tried, names)
        ]
        text = tuning_markdown(rows, rule_of(self.experiment.search), names)
        write_table(self.folder / "tuning", rows, text)
        print(text, flush=True)

    def _notes(self, ended: Sequence[str]) -> str:
        """Return notes for a reader of the table, with the runs that ``ended`` early."""
        notes = [*ended]
        if len(self.seeds) > 1:
            seeds = ", ".join(str(seed) for seed in self.seeds)
            notes.append(f"Mean ± standard deviation over seeds {seeds}.")
        if tunings := self.experiment.tunings:
            notes.append(f"{rule_of(self.experiment.search)} Scores: `tuning.md`.")
            notes += [f"{a} has none of these." for a in self.configs if a not in tunings]
            for algorithm, tried in self.experiment.tried().items():
                if tried and (note := remark(tunings[algorithm].domain, tried)):
                    notes.append(f"{algorithm}: {note}.")
        return "".join(f"\n{note}\n" for note in notes)

    def _placed(self, algorithm: str, name: str) -> RunConfig:
        """Return the config of a run in ``folder / name``, with its own client states."""
        config = self.configs[algorithm]
        folder, states = self.folder / name, config.state_dir
        if (
            self.engine == "ray" and config.stateful and not states
        ):  # `context.state` travels with every message
            states = str(folder / STATES)
        elif states and name != algorithm:
            states = str(Path(states) / name)
        return replace(config, output=str(folder), state_dir=states)

    def _task(self, config: RunConfig, tries: bool) -> Callable[[], None]:
        return partial(self._run, config, quiet=self.quiet_trials if tries else self.quiet)


def main(
    arguments: Sequence[str] | None = None, *, parser: Command | None = None
) -> list[dict[str, Any]]:
    """Compare from the command line; ``parser`` may be that of another command."""
    parser = parser or Command("compare", __doc__)
    add_options(parser)
    add_settings(parser)
    args = parser.read(arguments)
    settings = settings_of(args)
    refuse_contradictions(parser, args, settings)
    folder: Path = args.output.expanduser().absolute()
    with parser.explained(verbose=args.verbose):
        configs = configs_for(args.algorithms.split(","), args.param, settings, folder)
        comparison = Comparison(
            configs,
            folder,
            seeds=args.seeds,
            tune=spaces(configs, args.tune),
            trials=args.trials or 0,
            tuner=args.tuner or "grid",
            share=0.2 if args.tune_share is None else args.tune_share,
            tune_by=args.tune_by or "accuracy",
            engine=args.engine,
            workers=args.workers or 0,
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


def add_options(parser: Command) -> None:
    """Add the options of a comparison."""
    known = ", ".join(sorted(STRATEGIES))
    about = f"names with commas, of {known}; with parts (fedprox+adam), of {', '.join(PARTS)}"
    parser.add_argument("--algorithms", required=True, metavar="NAME,NAME,...", help=about)
    about = "a module, found from here, that registers an algorithm of your own"
    parser.add_argument("--import", type=imported, dest="module", metavar="MODULE", help=about)
    about = "folder for the results"
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help=about)
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="in-process",
        help="one process (default), or Flower's simulation on Ray",
    )
    parser.add_argument(
        "--workers", type=int, help="processes in which a run's clients train (Ray 2, in-process 1)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="in-process: runs at a time, one thread each (1)"
    )
    parser.add_argument(
        "--seeds", type=numbers(int), default=[], metavar="N,N,...", help="instead of --seed"
    )
    parser.add_argument(
        "--tune",
        action="append",
        default=[],
        metavar="NAME=V,V,...",
        help="choose a hyperparameter or local setting from these, on held-out training samples:"
        " lr=0.01,0.1, or fedadmm.rho=0.1,1; may be repeated",
    )
    parser.add_argument(
        "--trials",
        type=int,
        help="runs of each algorithm for --tune (as many as its largest grid has points)",
    )
    parser.add_argument(
        "--tuner",
        choices=TUNERS,
        help="grid (default): the values, then those beyond an end or between; optuna: numbers"
        " between the smallest and the largest",
    )
    parser.add_argument(
        "--tune-by",
        choices=("accuracy", "own-accuracy"),
        help="choose by the global model (accuracy), or by the personalized models",
    )
    parser.add_argument(
        "--tune-share",
        type=float,
        help="share of each client's training samples held out for --tune (0.2)",
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


def add_settings(parser: Command) -> None:
    """Add an option for each setting of the runs, which are None if not given."""
    for key in fields(RunConfig):
        if key.name in ("algorithm", "params", "output"):
            continue
        flag, default = "--" + key.name.replace("_", "-"), getattr(RunConfig, key.name)
        about = key.metadata["declared"].about
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=None, help=about)
        else:
            shown = "" if default in UNSET else f" ({default})"
            parser.add_argument(flag, type=type(default), help=about + shown)


def settings_of(args: Namespace) -> dict[str, Any]:
    """Return the settings of the runs that were given, by their names in a run-config."""
    return {
        key.name.replace("_", "-"): getattr(args, key.name)
        for key in fields(RunConfig)
        if key.name != "output" and getattr(args, key.name, None) is not None
    }


def refuse_contradictions(parser: Command, args: Namespace, settings: Mapping[str, Any]) -> None:
    """End the command for options that exclude each other."""
    if args.seed is not None and args.seeds:
        parser.error("either --seed or --seeds")
    for name, value in (("jobs", args.jobs), ("workers", args.workers), ("trials", args.trials)):
        if value is not None and value < 1:
            parser.error(f"--{name} must be >= 1, got {value}")
    for name in ("trials", "tuner", "tune_by", "tune_share"):
        if getattr(args, name) is not None and not args.tune:
            parser.error(f"--{name.replace('_', '-')} is for --tune")
    params = {text.partition("=")[0] for text in args.param}
    for name in (text.partition("=")[0] for text in args.tune):
        owner, _, setting = name.rpartition(".")
        if name in params or (owner not in PARTS and setting.replace("_", "-") in settings):
            parser.error(f"either a value of {name} or --tune {name}")
    if args.module and args.engine == "ray":
        parser.error("--import is for --engine in-process: Ray's clients know our algorithms alone")
    if args.jobs > 1 and args.engine == "ray":
        parser.error("--jobs is for --engine in-process; Ray has --workers")
    if args.jobs > 1 and args.workers is not None:
        parser.error("either --jobs, which does several runs at a time, or --workers, for one run")
    if "" in args.algorithms.split(","):
        parser.error(f"--algorithms has an empty name, got {args.algorithms!r}")


if __name__ == "__main__":
    main()
