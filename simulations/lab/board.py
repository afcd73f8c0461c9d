"""The board: the runs of its settings, and what they came to.

Each setting is an experiment (``simulations.lab.experiments``): each rule's hyperparameters are
chosen from one grid, on training samples held out; then each runs with the same seeds, from which
the verdict follows (``simulations.lab.verdicts``).

Settings may share their runs (``runs_in``), of which each reads another figure, or the choice of
hyperparameters (``tuned_by``), which is then that of one setting for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fl_strategies.core.settings_text import format_params, parse_params
from simulations.config import RunConfig
from simulations.lab.experiments import Experiment
from simulations.lab.measured import summary, value
from simulations.lab.runs import run_one
from simulations.lab.studies import Setting
from simulations.lab.tuners import Space
from simulations.lab.tuning import Search
from simulations.lab.verdicts import Judged, Row, judge
from simulations.models import TEXT
from simulations.problems import parts


def placed(setting: Setting, folder: Path, rule: str, name: str) -> RunConfig:
    """Return the checked config of a run of ``rule`` into ``folder / setting / name``."""
    output = folder / (setting.runs_in or setting).name / name
    return parsed(**{**setting.config, **setting.rules[rule].config, "output": str(output)})


@lru_cache(maxsize=None, typed=True)
def parsed(**config: Any) -> RunConfig:
    """Return the checked config; a study asks for each of its thousands many times."""
    return RunConfig.parse(config)


def experiment(setting: Setting, folder: Path) -> Experiment:
    """Return the experiment of a setting, whose runs are under ``folder``.

    Hyperparameters are chosen by the global model, or by the personalized models where these are
    compared.
    """
    rules: dict[str, Space] = {
        name: setting.tune if rule.tune is None else rule.tune
        for name, rule in setting.rules.items()
    }
    return Experiment(
        rules,
        place=partial(placed, setting, folder),
        name=lambda rule, seed: f"{rule}-seed{seed}",
        seeds=setting.seeds,
        search=Search(
            trials=setting.trials, seed=setting.seeds[0], own=setting.figure == "own_accuracy"
        ),
        chosen_in=experiment(setting.tuned_by, folder) if setting.tuned_by else None,
    )


def run(
    settings: Sequence[Setting],
    folder: Path,
    *,
    rules: Sequence[str] = (),
    jobs: int = 1,
    quiet: bool = False,
    on_done: Callable[[Setting], object] = lambda setting: None,
) -> None:
    """Run what is not finished of the settings, ``jobs`` runs at a time.

    ``rules`` are those to run; none: all. ``on_done`` is called after each run, with its setting.
    Raises ``ValueError`` for a rule that is in none of the settings, and for data that are not at
    hand; ``RuntimeError`` at the end, with the runs that failed.
    """
    known = {rule for setting in settings for rule in setting.rules}
    if unknown := set(rules) - known:
        raise ValueError(f"no rule {', '.join(sorted(unknown))}; rules: {', '.join(sorted(known))}")
    failed: list[str] = []
    for setting in settings:
        if setting.impossible:
            continue

        made = experiment(setting, folder)
        if todo := made.unfinished():
            parts(todo[0])  # what is wrong with the data is said once, not by each run
        try:
            made.run(
                lambda config, _: partial(run_one, config, quiet=quiet),
                rules=rules,
                jobs=jobs,
                on_done=partial(on_done, setting),
            )
        except RuntimeError as error:
            failed.append(f"{setting.name}: {error}")
    if failed:
        raise RuntimeError("; ".join(failed))


def judged(setting: Setting, folder: Path, counted: Collection[Setting] = ()) -> Judged:
    """Return the verdict on the runs of a setting that are finished.

    The cost of choosing its hyperparameters is its own, unless a setting of ``counted`` chose them.
    """
    if setting.impossible:
        return judge(
            setting, [Row(r, setting.published.get(r), (), "", 0.0) for r in setting.rules]
        )
    made = experiment(setting, folder)
    runs, tried = made.finished_runs(), made.tried()
    rows = []
    for rule in setting.rules:
        finished = [config for name, config in runs if name == rule]
        spent = tried.get(rule, [])
        own = setting.runs_in is None or rule not in setting.runs_in.rules  # and so its seconds
        missed = setting.horizon + 1.0
        paid = finished + [one.config for one in spent] * (setting.tuned_by not in counted)
        ended = tuple(
            f"seed {config.seed}: {cause}"
            for config in finished
            if (cause := summary(config)["given_up"])
        )
        rows.append(
            Row(
                rule,
                setting.published.get(rule),
                values=tuple(value(config, setting.figure, missed) for config in finished),
                chosen=_chosen(finished[0], made.rules[rule]) if finished else "",
                seconds=sum(summary(config)["seconds"] for config in paid * own),
                seeds=tuple(config.seed for config in finished),
                tried=tuple(format_params(one.values) for one in spent),
                ended=ended,
            )
        )
    return judge(setting, rows)


def _chosen(config: RunConfig, space: Space) -> str:
    """Return the run's learning rate, and its values of all else that was tuned."""
    values = vars(config) | parse_params(config.params)
    others = {name: values[name] for name in space if name != "lr"}
    return ", ".join([f"{config.lr:g}", *([format_params(others)] if others else [])])


# ---- in short ------------------------------------------------------------------------------------


SMALL = {"rounds": 2, "evaluate-every": 1, "stop-at-target": False}
FEWER = {"epochs": 1, "steps": 2, "target": 0.05, "model": "logistic"}


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes a short run of ``config``: two rounds of two clients with a small model.

    Where all clients train in each round they still do: FedPD asks all. A model of text stays.
    """
    changes = SMALL | {key: value for key, value in FEWER.items() if key in config}
    if config.get("model") in TEXT:
        del changes["model"]
    if config.get("fraction", 1.0) < 1.0:
        changes["fraction"] = min(1.0, 2 / int(config["clients"]))
    return changes


def shrunk(setting: Setting) -> Setting:
    """Return the setting with two rounds of two clients, two seeds and a small model.

    That is a test that all of it still runs; what it comes to says nothing.
    """
    rules = {
        name: rule._replace(
            config={**rule.config, **small(rule.config)},
            tune=None if rule.tune is None else _fewer(rule.tune),
        )
        for name, rule in setting.rules.items()
    }
    return setting._replace(
        where=f"{setting.where}: a trial of two rounds, no result",
        config={**setting.config, **small(setting.config)},
        rules=rules,
        seeds=setting.seeds[:2],
        tune=_fewer(setting.tune),
        tuned_by=None if setting.tuned_by is None else shrunk(setting.tuned_by),
    )


def _fewer(space: Space) -> Space:
    return {name: values[:2] for name, values in space.items()}
