"""Tuners of hyperparameters: a grid, and Optuna's sampler.

A tuner is a generator: it yields the values to try next, is sent their trials, and ends when it has
no more. It draws from a seed alone, so that a search which was killed is repeated from the folders
of its runs, and continues with the values that it would have tried.

``grid``      all points, or a seeded sample of as many as there are trials. Trials that remain go
              to the next value beyond an end of the grid at which the choice lies, else between the
              choice and its neighbours
``optuna``    Optuna's sampler (TPE), seeded, between the smallest and the largest value of each
              hyperparameter; it chooses among words
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeAlias

from fl_strategies.core.randomness import stream
from simulations.config import RunConfig

Values: TypeAlias = dict[str, Any]
"""By hyperparameter of the algorithm, or setting of local training (``batch_size``)."""
Space: TypeAlias = Mapping[str, Sequence[Any]]
"""The values to choose from."""


class Trial(NamedTuple):
    """A finished run of a search."""

    values: Values
    score: float
    config: RunConfig


Tuner: TypeAlias = Generator[list[Values], list[Trial], None]
NEAR = 0.05
"""A choice is at an end if it is no further from it than this share of all that was tried."""
PATIENCE = 10
"""How often Optuna may ask for values that cannot run, for each trial."""


class Domain(NamedTuple):
    """Where a tuner looks, and with which budget."""

    values: Space
    kinds: Mapping[str, type | None]
    """int or float of a number, None of what has no order."""
    trials: int
    seed: int
    allows: Callable[[Values], bool]
    """Whether a run with such values can begin."""

    def ladder(self, name: str, tried: Sequence[Trial]) -> tuple[list[Any], int]:
        """Return the numbers that were tried, ascending, and the place of the chosen one."""
        if self.kinds[name] is None:
            return [], 0
        ladder = sorted({trial.values[name] for trial in tried})
        return ladder, ladder.index(best_of(tried).values[name])


def points(space: Space) -> list[Values]:
    """Return all points of the grid in ascending order; one without values if nothing is tuned."""
    axes = [sorted(values, key=_order) for values in space.values()]
    return [dict(zip(space, point, strict=True)) for point in product(*axes)]


def best_of(tried: Sequence[Trial]) -> Trial:
    """Return the trial with the best score; among equal scores that of the smaller values."""
    return min(tried, key=lambda one: (-one.score, [_order(v) for v in one.values.values()]))


def _order(value: Any) -> tuple[float, str]:
    return (value, "") if isinstance(value, int | float) else (math.inf, str(value))


def remark(domain: Domain, tried: Sequence[Trial]) -> str:
    """Return where a choice lies at an end of what was tried, or that all scores are equal."""
    if len({trial.score for trial in tried}) == 1:
        return "all trials have the same score"
    ends = []
    for name in domain.values:
        for number in beyond(domain, name, tried):
            if domain.allows(best_of(tried).values | {name: number}):
                less = number < best_of(tried).values[name]
                end, other = ("lower", "smaller") if less else ("upper", "larger")
                ends.append(f"{name} is at the {end} end: a {other} one may do better")
    return "; ".join(ends)


def by_grid(domain: Domain) -> Tuner:
    """Yield the points of the grid; afterwards the numbers beyond its ends, or within it."""
    new = points(domain.values)
    if len(new) > domain.trials:
        drawn = stream(domain.seed, "tune").choice(len(new), domain.trials, replace=False)
        new = [new[n] for n in sorted(drawn)]
    tried: list[Trial] = []
    while new:
        tried += yield new
        best, seen = best_of(tried).values, [trial.values for trial in tried]
        for around in (beyond, _between):
            near = [best | {n: number} for n in best for number in around(domain, n, tried)]
            if new := [values for values in near if values not in seen and domain.allows(values)]:
                break


def beyond(domain: Domain, name: str, tried: Sequence[Trial]) -> Iterator[Any]:
    """Yield the next number beyond an end of what was tried, if the choice lies there."""
    ladder, place = domain.ladder(name, tried)
    for end, inner in ((0, 1), (len(ladder) - 1, len(ladder) - 2)):
        if len(ladder) > 1 and _share(ladder, place, end) < NEAR:
            a, b = ladder[inner], ladder[end]
            number = _rounded(b * b / a if min(a, b) > 0 else 2 * b - a, domain.kinds[name])
            if number not in ladder:
                yield number


def _share(ladder: Sequence[float], place: int, end: int) -> float:
    """Return how far a place is from an end, as a share of all that was tried."""
    low, number, high, last = (ladder[n] for n in (0, place, -1, end))
    if low > 0:
        low, number, high, last = (math.log(one) for one in (low, number, high, last))
    return abs(number - last) / (high - low)


def _between(domain: Domain, name: str, tried: Sequence[Trial]) -> Iterator[Any]:
    """Yield the numbers halfway to the neighbours of the choice."""
    ladder, place = domain.ladder(name, tried)
    for a, b in pairwise(ladder):
        if ladder[place] in (a, b):
            yield _rounded(math.sqrt(a * b) if a > 0 else (a + b) / 2, domain.kinds[name])


def _rounded(number: float, kind: type | None) -> Any:
    return round(number) if kind is int else float(f"{number:.3g}")


def by_optuna(domain: Domain) -> Tuner:
    """Yield one point after the other, as Optuna asks for it."""
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    first = 1 + domain.trials // 3  # random points, on which the model of the scores begins
    sampler = optuna.samplers.TPESampler(seed=domain.seed, n_startup_trials=first)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    kinds = domain.kinds
    ranges = {n: _range(optuna.distributions, kinds[n], v) for n, v in domain.values.items()}
    for _ in range(PATIENCE * domain.trials):
        asked = study.ask(ranges)
        values = {n: _rounded(v, kinds[n]) if kinds[n] else v for n, v in asked.params.items()}
        if domain.allows(values):
            (trial,) = yield [values]
            study.tell(asked, trial.score)
        else:
            study.tell(asked, state=optuna.trial.TrialState.FAIL)


def _optuna() -> Any:
    try:
        return import_module("optuna")
    except ImportError as error:
        raise ValueError(
            f"the tuner optuna needs Optuna, which the extra 'tune' installs: {error}"
        ) from error


def _range(made: Any, kind: type | None, values: Sequence[Any]) -> Any:
    if kind is None:
        return made.CategoricalDistribution(list(values))
    low, high = min(values), max(values)
    number = made.IntDistribution if kind is int else made.FloatDistribution
    return number(low, high, log=low > 0)


TUNERS: dict[str, Callable[[Domain], Tuner]] = {"grid": by_grid, "optuna": by_optuna}
