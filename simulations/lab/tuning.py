"""The choice of hyperparameters on training samples held out, the same for all that are compared.

The tuners are in ``simulations.lab.tuners``; the runs' folders hold what was tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from statistics import fmean
from typing import Any, NamedTuple

from clients import LocalTraining
from fl_strategies import STRATEGIES
from fl_strategies.core.schedules import shown
from fl_strategies.core.settings_text import format_params, parse_params
from fl_strategies.parts import PARTS
from simulations.config import RunConfig, hyperparameters_of
from simulations.lab.measured import summary, value
from simulations.lab.runs import finished
from simulations.lab.tuners import TUNERS, Domain, Space, Trial, Values, best_of, points, remark
from simulations.rules import given_to
from simulations.tables import Row, curve, grid

MEASURE = ("fine_tune", "fine_tune_lr", "fine_tune_epochs", "residual")
"""Local settings that measure, and do not train."""


class Search(NamedTuple):
    """How hyperparameters are chosen."""

    tuner: str = "grid"
    trials: int = 0
    """Runs for each rule; 0: as many as its grid has points."""
    seed: int = 1
    share: float = 0.2
    """Of each client's training samples, held out to choose by."""
    own: bool = False
    """Whether personalized models are tested, each on what its client holds out."""


# ---- what can be tuned --------------------------------------------------------------------------


def spaces(configs: Sequence[RunConfig], texts: Sequence[str]) -> dict[str, Space]:
    """Return what "rho=0.1,1", "fedadmm.lr=0.01,0.1" and "adam.lr=0.1,1" let rules choose from.

    Raises ``ValueError`` for a name that no rule here has, and for values that one refuses.
    """
    known = {config.rule: tunable(config) for config in configs}
    parts = {part.name for config in configs for part in config.parts.values()}
    assigned = given_to(known, items=texts, read=read, option="tune", parts=parts)
    by_rule: dict[str, Space] = {}
    for config in configs:
        of_parts = {
            f"{part.name}.{name}": values
            for part in config.parts.values()
            for name, values in assigned[part.name].items()
        }
        by_rule[config.rule] = assigned[config.rule] | of_parts
        for values in points(by_rule[config.rule]):
            with_values(config, values).check()
    return by_rule


def tunable(config: RunConfig) -> list[str]:
    """Return the names of the algorithm's hyperparameters and of the local settings it uses."""
    unused = {name.replace("-", "_") for name in config.unused()}
    local = [key.name for key in fields(LocalTraining) if key.name not in (*MEASURE, *unused)]
    return list(dict.fromkeys([*hyperparameters_of(config.algorithm), *local]))


def read(text: str) -> dict[str, tuple[Any, ...]]:
    """Return ``{"rho": (0.1, 1)}`` from "rho=0.1,1"; raise ``ValueError`` for less than two."""
    name, _, listed = text.partition("=")
    items = [parse_params(f"{name}={value}") for value in listed.split(",")]
    (name,) = items[0]
    values = tuple(value[name] for value in items)
    if any(one in values[:n] for n, one in enumerate(values)):
        raise ValueError(f"tune: each value once, got {shown(text)}")
    if len(values) < 2:
        raise ValueError(f"tune: {name} needs at least two values, got {shown(text)}")
    return {name: values}


def with_values(config: RunConfig, values: Values) -> RunConfig:
    """Return the config with ``values``; raise ``ValueError`` for one that cannot be."""
    known = hyperparameters_of(config.algorithm)
    params = parse_params(config.params) | {n: v for n, v in values.items() if n in known}
    parts: dict[str, Any] = {
        stage: str(type(part)(**part.values | _of_part(part.name, values)))
        for stage, part in config.parts.items()
    }
    local = {name: v for name, v in values.items() if name not in known and "." not in name}
    if isinstance(drawn := local.get("random_epochs"), bool):
        local["random_epochs"] = str(drawn).lower()  # the run-config's words
    local = {name: RunConfig.typed(name, value) for name, value in local.items()}
    return replace(config, params=format_params(params), **local, **parts)


def _of_part(part: str, values: Values) -> Values:
    return {n.partition(".")[2]: v for n, v in values.items() if n.startswith(f"{part}.")}


def kind_of(config: RunConfig, name: str, values: Sequence[Any]) -> type | None:
    """Return int or float for a number, None for what has no order."""
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return None
    part, dot, option = name.partition(".")
    if dot:
        kind = PARTS[part].declarations[option].kind
    elif name in hyperparameters_of(config.algorithm):
        kind = STRATEGIES[config.algorithm].declarations[name].kind
    else:
        kind = type(getattr(RunConfig, name))
    return int if kind is int else float


# ---- a search -----------------------------------------------------------------------------------


class Tuning:
    """The search for the hyperparameters of one rule.

    ``place`` returns the rule's config of a run in the folder of a name.
    """

    def __init__(
        self, place: Callable[[str], RunConfig], rule: str, space: Space, search: Search
    ) -> None:
        self.place, self.rule, self.search = place, rule, search
        self.base = place(rule)
        kinds = {name: kind_of(self.base, name, values) for name, values in space.items()}
        trials = search.trials or len(points(space))
        self.domain = Domain(space, kinds, trials, search.seed, self.allows)

    def look(self) -> tuple[list[Trial], list[RunConfig]]:
        """Return what was tried, and the runs to make next: none when the choice can be made."""
        tried: list[Trial] = []
        if not self.domain.values:
            return tried, []
        tuner = TUNERS[self.search.tuner](self.domain)
        new: list[Values] | None = next(tuner)
        while new and (left := self.domain.trials - len(tried)):
            made = [(values, self.config(values)) for values in new[:left]]
            done = [Trial(v, score(c, own=self.search.own), c) for v, c in made if finished(c)]
            tried += done
            if len(done) < len(made):
                known = {trial.config for trial in done}
                return tried, [config for _, config in made if config not in known]
            with suppress(StopIteration):
                new = None
                new = tuner.send(done)
        return tried, []

    def config(self, values: Values) -> RunConfig:
        """Return the run that tries ``values``: a share of the training samples is held out.

        It measures nothing but what the choice needs, and runs to its end.
        """
        base, search = self.place(f"tuning/{self.rule}-{named(values)}"), self.search
        return replace(
            with_values(base, values),
            seed=search.seed,
            validation=search.share,
            stop_at_target=False,
            fraction_evaluate=base.fraction_evaluate if search.own else 0.0,
            fine_tune="off",
            fine_tune_lr=-1.0,
            fine_tune_epochs=0,
            gradient_norm="false",
        )

    def allows(self, values: Values) -> bool:
        """Return whether a run with ``values`` can begin."""
        try:
            with_values(self.base, values).check()
        except ValueError:
            return False
        return True


def named(values: Values) -> str:
    """Return the name of a trial's folder."""
    texts = (f"{n}{v:.12g}" if isinstance(v, float) else f"{n}{v}" for n, v in values.items())
    return "-".join(texts).replace("/", "_")


def score(config: RunConfig, *, own: bool = False) -> float:
    """Return a trial's mean accuracy over the last fifth of its rounds (rounded up); 0 for none.

    With ``own``, that of the personalized models at the end. A trial that diverges has 0.
    """
    if summary(config).get("given_up"):
        return 0.0
    if own:
        return value(config, "own_accuracy", 0.0)
    accuracies = [row["test_accuracy"] for row in curve(config) if row["test_accuracy"] is not None]
    last = accuracies[-math.ceil(len(accuracies) / 5) :]
    return fmean(last) if last else 0.0


# ---- its table ----------------------------------------------------------------------------------


def rule_of(search: Search) -> str:
    """Return how values are chosen, in words."""
    score = "the mean accuracy on all held-out samples over the last fifth of the rounds"
    if search.own:
        score = "the mean accuracy of the personalized models at the end, each on what its client"
        score += " holds out"
    return (
        f"Hyperparameters were tuned per algorithm on seed {search.seed} alone:"
        f" {100 * search.share:g} % of each client's training samples were held out, and the score"
        f" of a trial is {score}. The highest score wins; among equal scores the smaller value"
        " wins. No test data were used. The compared runs train on all training samples. Each"
        f" algorithm had the same budget of {search.trials} trials, spent by {search.tuner}."
    )


def tuning_rows(tuning: Tuning, tried: Sequence[Trial], names: Sequence[str]) -> list[Row]:
    """Return a row per trial; one is ``chosen``, perhaps with a ``remark``."""
    best, note = best_of(tried), remark(tuning.domain, tried)
    return [
        {
            "algorithm": tuning.rule,
            **{name: one.values.get(name) for name in names},
            "score": one.score,
            "chosen": one is best,
            "remark": note if one is best else "",
        }
        for one in tried
    ]


def tuning_markdown(rows: Sequence[Row], rule: str, names: Sequence[str]) -> str:
    """Return the rows as a table under the rule; the chosen ones are bold."""
    lines = []
    for row in rows:
        values = ["-" if row[name] is None else f"{row[name]}" for name in names]
        cells = [*values, f"{100 * row['score']:.2f} %"]
        cells = [f"**{cell}**" if row["chosen"] else cell for cell in cells]
        lines.append([row["algorithm"], *cells, row["remark"]])
    return f"{rule}\n\n{grid(['algorithm', *names, 'score', 'remark'], lines)}"
