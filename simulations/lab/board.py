"""The board: what papers publish, what is found here, with which certainty, and the verdict.

A :class:`Setting` is one published comparison: rules on the same data, of which one is the paper's.
Each rule's learning rate is chosen from one grid, on training samples held out (the rule of
``simulations.tables``); then each runs with the same seeds, from which

interval        the 95 % t interval of the mean over seeds
prediction      the 95 % t interval in which one more run would lie
difference      of the paper's rule less the best baseline (by its mean here), in pairs of the same
                seed, with its 95 % t interval

*Reproduced* is a setting whose difference lies on the published side of 0 with its whole interval,
and whose published number lies in the interval of prediction; *order only*, if the number does not;
*not*, if the interval holds 0 or lies on the other side. Where the paper's rule is behind a
baseline by its own numbers, the differences to all published baselines must lie on their sides. A
setting without a paper's rule, of a benchmark, is reproduced if each published number lies in its
rule's interval of prediction. A setting without published numbers says whether the rule is *ahead*
of the best baseline or *behind* it with the whole interval, or *level*. What cannot be run says
why.

Settings may share their runs (``runs_in``), of which each reads another figure, or the choice of
learning rates (``tuned_by``), which is then that of one setting for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from fl_strategies.core.params import format_params
from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.lab.cells import diverging_allowed, finished, run_cells, trial
from simulations.lab.flower_server import run_under_flower
from simulations.lab.measured import KINDS, Figure, summary, value
from simulations.tables import score, tuned
from simulations.worker import parts

Verdict = Literal[
    "reproduced", "order only", "not", "not run", "not possible here", "ahead", "level", "behind"
]

CONFIDENCE = 0.95
SHARE = 0.2
"""Of each client's training samples, held out to choose the learning rate by."""


class Rule(NamedTuple):
    """An algorithm with hyperparameters, and what its run-config sets beside the setting's."""

    algorithm: str
    params: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}
    reference: bool = False
    """A row to compare with that is no baseline: training in one place, the authors' own form."""
    rates: tuple[float, ...] | None = None
    """Learning rates to choose from. None: the setting's; empty: the config's ``lr`` alone."""
    server: str = ""
    """A server of ``flower_server.SERVERS`` in place of the algorithm's."""


DRAWN = {"random-epochs": "true"}
"""Numbers of local epochs are drawn from 1..E."""
FIXED = {"random-epochs": "false"}


def centralised(**config: Any) -> Rule:
    """Return training on all data in one place: one client, which trains in every round."""
    one = {"clients": 1, "fraction": 1.0, "partition": "iid", "partition-params": ""}
    return Rule("fedavg", config=one | config, reference=True)


class Line(NamedTuple):
    """A setting's place in a figure of several settings: one line for each rule."""

    figure: str
    """The figure's file, without suffix."""
    axis: str
    at: float


class Setting(NamedTuple):
    """A published comparison, and how it is run here."""

    name: str
    where: str
    """Paper, table, row."""
    figure: Figure
    ours: str
    """The rule of the paper; "" for a benchmark's setting."""
    rules: Mapping[str, Rule]
    published: Mapping[str, float]
    """Its figure by rule: a share, or rounds (more than the horizon for "not within it")."""
    config: Mapping[str, Any]
    rates: tuple[float, ...] = ()
    """Learning rates to choose from; none: those of the configs."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    impossible: str = ""
    """Why it cannot be run here."""
    runs_in: Setting | None = None
    """The setting whose runs it reads and adds to, if they are not its own alone."""
    tuned_by: Setting | None = None
    """The setting that chose the learning rates, if it did not itself; rules are of one name."""
    line: Line | None = None
    curves: tuple[str, ...] = ()
    """What test accuracy is drawn against: columns of ``simulations.tables.curve``."""

    @property
    def horizon(self) -> int:
        """Rounds of a run."""
        return int(self.config["rounds"])


class Interval(NamedTuple):
    """A mean, and how far its interval goes to either side."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """Its lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Its upper end."""
        return self.mean + self.half


def interval(values: Sequence[float], *, of_next: bool = False) -> Interval:
    """Return the t interval of the mean of ``values``, or of one value more.

    Raises ``ValueError`` for fewer than two values, of which there is none.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"an interval needs at least two values, got {n}")
    factor = math.sqrt(1.0 / n + of_next)
    from scipy.stats import t  # here: it takes a second, and few tables need it

    half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * stdev(values) * factor
    return Interval(fmean(values), half)


class Row(NamedTuple):
    """A rule of a setting: what is published, and what its seeds came to."""

    rule: str
    published: float | None
    values: tuple[float, ...]
    lr: float | None
    seconds: float
    """Of all its runs, the choice of its rate included."""


class Judged(NamedTuple):
    """A setting with what was found, as ``board.json`` holds it."""

    setting: Setting
    rows: tuple[Row, ...]
    best: str
    """The best baseline, by its mean here."""
    difference: Interval | None
    verdict: Verdict


def judge(setting: Setting, rows: Sequence[Row]) -> Judged:
    """Return the verdict on ``rows``, those of the rules that ran with every seed."""
    if setting.impossible:
        return Judged(setting, tuple(rows), "", None, "not possible here")
    sign = -1.0 if KINDS[setting.figure].less_is_better else 1.0
    whole = {row.rule: row for row in rows if len(row.values) == len(setting.seeds)}
    baselines = [
        row
        for name, row in whole.items()
        if name != setting.ours and not setting.rules[name].reference
    ]
    ours = whole.get(setting.ours)
    if not baselines or (setting.ours and ours is None):
        return Judged(setting, tuple(rows), "", None, "not run")
    if ours is None:
        return Judged(setting, tuple(rows), "", None, _foretold(setting, whole))
    best = max(baselines, key=lambda row: sign * fmean(row.values))
    found = _difference(ours, best)
    low, high = sorted((sign * found.low, sign * found.high))
    verdict: Verdict = "ahead" if low > 0 else "behind" if high < 0 else "level"
    if setting.published:
        verdict = "not"
        if _in_order(ours, baselines, best, sign):
            verdict = "reproduced" if _within(ours) else "order only"
    return Judged(setting, tuple(rows), best.rule, found, verdict)


def _difference(ours: Row, other: Row) -> Interval:
    return interval([a - b for a, b in zip(ours.values, other.values, strict=True)])


def _in_order(ours: Row, baselines: Sequence[Row], best: Row, sign: float) -> bool:
    """Return whether whole intervals of the differences lie on their published sides."""
    gaps = [
        (row, ours.published - row.published)
        for row in baselines
        if ours.published is not None and row.published is not None
    ]
    leads = all(sign * gap >= 0.0 for _, gap in gaps)
    sides = [(best, sign)] if leads else [(row, gap) for row, gap in gaps if gap]
    differences = [(_difference(ours, row), math.copysign(1.0, side)) for row, side in sides]
    return all(side * found.mean > found.half for found, side in differences)


def _within(row: Row) -> bool:
    """Return whether the published number could be that of one more run."""
    ahead = interval(row.values, of_next=True)
    return row.published is not None and ahead.low <= row.published <= ahead.high


def _foretold(setting: Setting, whole: Mapping[str, Row]) -> Verdict:
    """Return the verdict on a benchmark's numbers."""
    if setting.published.keys() - whole.keys():
        return "not run"
    return "reproduced" if all(_within(whole[rule]) for rule in setting.published) else "not"


# ---- runs ---------------------------------------------------------------------------------------


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


def chosen(setting: Setting, folder: Path) -> dict[str, float | None]:
    """Return each rule's learning rate, by its :func:`trials`; None as long as one is missing.

    It is chosen by the global model, or by the personalized models where these are compared.
    """
    scores: dict[str, dict[float, float]] = {}
    rates: dict[str, float | None] = {}
    own = (setting.tuned_by or setting).figure == "own_accuracy"
    for (rule, rate), config in trials(setting, folder).items():
        if finished(config):
            found = value(config, "own_accuracy", 0.0) if own else score(config)
            scores.setdefault(rule, {})[rate] = found
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
    made = runs(setting, folder, chosen(setting, folder))
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
    hand.
    """
    known = {rule for setting in settings for rule in setting.rules}
    if unknown := set(rules) - known:
        raise ValueError(f"no rule {', '.join(sorted(unknown))}; rules: {', '.join(sorted(known))}")

    def run_all(setting: Setting, configs: Mapping[tuple[str, Any], RunConfig]) -> None:
        work = {
            config: partial(run_one, config, setting.rules[rule].server, quiet=quiet)
            for (rule, _), config in configs.items()
            if not rules or rule in rules
        }
        if todo := [config for config in work if not finished(config)]:
            parts(todo[0])  # what is wrong with the data is said once, not by each run
        if work:
            run_cells(work, jobs=jobs, on_done=partial(on_done, setting))

    for setting in settings:
        if not setting.impossible:
            run_all(setting, trials(setting, folder))
            run_all(setting, runs(setting, folder, chosen(setting, folder)))


def run_one(config: RunConfig, server: str = "", *, quiet: bool = False) -> None:
    """Run one, under Flower's ``server`` if one is named; that it diverges is a result."""
    with diverging_allowed(config):
        if server:
            run_under_flower(config, server, quiet=quiet)
        else:
            run_in_process(config, quiet=quiet)


def found(setting: Setting, folder: Path) -> Judged:
    """Return the verdict on the runs of a setting that are finished."""
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
        paid = [*mine * own, *spent * (own and setting.tuned_by is None)]
        seconds = sum(summary(config)["seconds"] for config in paid)
        lr = mine[0].lr if mine else None
        rows.append(Row(rule, setting.published.get(rule), values, lr, seconds))
    return judge(setting, rows)


# ---- in short ------------------------------------------------------------------------------------


def shrunk(setting: Setting) -> Setting:
    """Return the setting with two rounds of two clients, two seeds and a small model.

    Where all clients train in each round they still do: FedPD asks all. That is a test that all of
    it still runs; what it comes to says nothing.
    """
    clients = int(setting.config["clients"])
    small: dict[str, Any] = {"rounds": 2, "evaluate-every": 2, "epochs": 1}
    small |= {"model": "logistic", "target": 0.05, "stop-at-target": False}
    rules = {
        name: rule._replace(
            config={k: v for k, v in rule.config.items() if k not in small},
            rates=None if rule.rates is None else rule.rates[:2],
        )
        for name, rule in setting.rules.items()
    }
    if setting.config["fraction"] < 1.0:
        small["fraction"] = min(1.0, 2 / clients)
    if "steps" in setting.config:
        small["steps"] = 2
    return setting._replace(
        config={**setting.config, **small},
        rules=rules,
        seeds=setting.seeds[:2],
        rates=setting.rates[:2],
        tuned_by=None if setting.tuned_by is None else shrunk(setting.tuned_by),
    )
