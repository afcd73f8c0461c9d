"""The board: the runs of its settings, and what they came to.

Each rule's learning rate is chosen from one grid, on training samples held out (the rule of
``simulations.tables``); then each runs with the same seeds, from which the verdict follows
(``simulations.lab.verdicts``).

Settings may share their runs (``runs_in``), of which each reads another figure, or the choice of
learning rates (``tuned_by``), which is then that of one setting for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fl_strategies.core.settings_text import format_params
from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.lab.cells import diverging_allowed, finished, run_cells, trial
from simulations.lab.flower_server import run_under_flower
from simulations.lab.measured import summary, value
from simulations.lab.settings import Setting, small
from simulations.lab.verdicts import Judged, Row, judge
from simulations.problems import parts
from simulations.tables import score, tuned

SHARE = 0.2
"""Of each client's training samples, held out to choose the learning rate by."""


def placed(setting: Setting, rule: str, name: str, folder: Path, **others: Any) -> RunConfig:
    """Return the checked config of a run of ``rule`` into ``folder / setting / name``."""
    one = setting.rules[rule]
    config = {
        **setting.config,
        **one.config,
        "algorithm": one.algorithm,
        "params": format_params(dict(one.params)),
        "output": str(folder / (setting.runs_in or setting).name / name),
    }
    return replace(RunConfig.parse(config), **others)


def trials(setting: Setting, folder: Path) -> dict[tuple[str, float], RunConfig]:
    """Return the runs that choose each rule's learning rate."""
    setting = setting.tuned_by or setting
    return {
        (name, rate): trial(
            placed(setting, name, f"tuning/{name}-lr{rate:g}", folder),
            rate,
            seed=setting.seeds[0],
            share=SHARE,
            own=setting.figure == "own_accuracy",
        )
        for name, rule in setting.rules.items()
        for rate in (setting.rates if rule.rates is None else rule.rates)
    }


def chosen(
    setting: Setting, tried: Mapping[tuple[str, float], RunConfig]
) -> dict[str, float | None]:
    """Return each rule's learning rate, by its :func:`trials`; None as long as one is missing.

    It is chosen by the global model, or by the personalized models where these are compared; a rate
    with which all clients diverge scores 0.
    """
    scores: dict[str, dict[float, float]] = {}
    rates: dict[str, float | None] = {}
    own = (setting.tuned_by or setting).figure == "own_accuracy"
    for (rule, rate), config in tried.items():
        if finished(config):
            found = value(config, "own_accuracy", 0.0) if own else score(config)
            ended = bool(summary(config)["given_up"])
            scores.setdefault(rule, {})[rate] = 0.0 if ended else found
        else:
            rates[rule] = None
    rows = [row for rule, mine in scores.items() for row in tuned(rule, mine)]
    return {row["algorithm"]: row["lr"] for row in rows if row["chosen"]} | rates


def runs(
    setting: Setting, folder: Path, rates: Mapping[str, float | None]
) -> dict[tuple[str, int], RunConfig]:
    """Return the runs that are compared, seed by seed, of the rules whose rate is :func:`chosen`.

    A rule that has no rates to choose from keeps that of its config.
    """
    return {
        (rule, seed): placed(
            setting, rule, f"{rule}-seed{seed}", folder, seed=seed,
            **({"lr": rates[rule]} if rule in rates else {}),
        )
        for seed in setting.seeds
        for rule in setting.rules
        if rates.get(rule, 0.0) is not None
    }  # fmt: skip


def finished_runs(setting: Setting, folder: Path) -> list[tuple[str, RunConfig]]:
    """Return rule and config of each compared run that is finished."""
    made = runs(setting, folder, chosen(setting, trials(setting, folder)))
    return [(rule, config) for (rule, _), config in made.items() if finished(config)]


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

    def run_all(setting: Setting, configs: Mapping[tuple[str, Any], RunConfig]) -> None:
        work = {
            config: partial(run_one, config, setting.rules[rule].server, quiet=quiet)
            for (rule, _), config in configs.items()
            if not rules or rule in rules
        }
        if todo := [config for config in work if not finished(config)]:
            parts(todo[0])  # what is wrong with the data is said once, not by each run
        try:
            run_cells(work, jobs=jobs, on_done=partial(on_done, setting))
        except RuntimeError as error:
            failed.append(f"{setting.name}: {error}")

    for setting in settings:
        if not setting.impossible:
            tried = trials(setting, folder)
            run_all(setting, tried)
            run_all(setting, runs(setting, folder, chosen(setting, tried)))
    if failed:
        raise RuntimeError("; ".join(failed))


def run_one(config: RunConfig, server: str = "", *, quiet: bool = False) -> None:
    """Run one, under Flower's ``server`` if one is named; that it diverges is a result."""
    with diverging_allowed(config):
        if server:
            run_under_flower(config, server, quiet=quiet)
        else:
            run_in_process(config, quiet=quiet)


def found(setting: Setting, folder: Path, told: Collection[Setting] = ()) -> Judged:
    """Return the verdict on the runs of a setting that are finished.

    The cost of choosing its rates is its own, unless a setting of ``told`` chose them.
    """
    if setting.impossible:
        return judge(
            setting, [Row(r, setting.published.get(r), (), None, 0.0) for r in setting.rules]
        )
    tried = trials(setting, folder)
    made = finished_runs(setting, folder)
    rows = []
    for rule in setting.rules:
        mine = [config for name, config in made if name == rule]
        spent = [config for (name, _), config in tried.items() if name == rule and finished(config)]
        own = setting.runs_in is None or rule not in setting.runs_in.rules  # and so its seconds
        missed = setting.horizon + 1.0
        values = tuple(value(config, setting.figure, missed) for config in mine)
        paid = [*mine * own, *spent * (own and setting.tuned_by not in told)]
        seconds = sum(summary(config)["seconds"] for config in paid)
        lr = mine[0].lr if mine else None
        rates = tuple(config.lr for config in spent)
        seeds = tuple(config.seed for config in mine)
        ended = tuple(
            f"seed {config.seed}: {cause}"
            for config in mine
            if (cause := summary(config)["given_up"])
        )
        published = setting.published.get(rule)
        rows.append(Row(rule, published, values, lr, seconds, seeds, rates, ended))
    return judge(setting, rows)


# ---- in short ------------------------------------------------------------------------------------


def shrunk(setting: Setting) -> Setting:
    """Return the setting with two rounds of two clients, two seeds and a small model.

    That is a test that all of it still runs; what it comes to says nothing.
    """
    rules = {
        name: rule._replace(
            config={**rule.config, **small(rule.config)},
            rates=None if rule.rates is None else rule.rates[:2],
        )
        for name, rule in setting.rules.items()
    }
    return setting._replace(
        where=f"{setting.where}: a trial of two rounds, no result",
        config={**setting.config, **small(setting.config)},
        rules=rules,
        seeds=setting.seeds[:2],
        rates=setting.rates[:2],
        tuned_by=None if setting.tuned_by is None else shrunk(setting.tuned_by),
    )
