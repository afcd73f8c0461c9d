"""An experiment: rules that are compared, each with the same seeds, after it was tuned.

``compare`` is one experiment of algorithms, ``reproduce`` one of each setting of the board. What
was run is read from the runs' folders, so that an experiment can be looked at, continued and
repeated at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from simulations.config import RunConfig
from simulations.lab.runs import finished, run_all
from simulations.lab.tuners import Space, Trial, best_of
from simulations.lab.tuning import Search, Tuning, with_values

Task = Callable[[RunConfig, bool], Callable[[], object]]
"""Returns the function that makes a run; true for one that only tries values."""


class Experiment:
    """Runs of ``rules`` with each of ``seeds``.

    Parameters
    ----------
    rules : what each rule chooses its hyperparameters from; nothing for one that has them
    place : returns the config of a rule's run in the folder of a name
    name : returns the name of the folder of a rule's run with a seed
    search : how hyperparameters are chosen
    chosen_in : the experiment that chooses the hyperparameters, if it is another
    """

    def __init__(
        self,
        rules: Mapping[str, Space],
        place: Callable[[str, str], RunConfig],
        name: Callable[[str, int], str],
        seeds: Sequence[int],
        search: Search,
        chosen_in: Experiment | None = None,
    ) -> None:
        self.rules, self.place, self.name, self.seeds = rules, place, name, seeds
        self.search, self.chosen_in = search, chosen_in

    @cached_property
    def tunings(self) -> dict[str, Tuning]:
        """The search of each rule that is tuned."""
        if self.chosen_in is not None:
            return self.chosen_in.tunings
        return {
            rule: Tuning(partial(self.place, rule), rule, space, self.search)
            for rule, space in self.rules.items()
            if space
        }

    def tried(self) -> dict[str, list[Trial]]:
        """Return the finished trials of each rule that is tuned."""
        return {rule: tuning.look()[0] for rule, tuning in self.tunings.items()}

    def waiting(self, rules: Sequence[str] = ()) -> list[RunConfig]:
        """Return the trials to run next."""
        return [
            config
            for rule, tuning in self.tunings.items()
            if not rules or rule in rules
            for config in tuning.look()[1]
        ]

    def runs(self) -> dict[tuple[str, int], RunConfig]:
        """Return the runs that are compared, seed by seed, of the rules whose choice is made."""
        values: dict[str, dict[str, Any] | None] = {}
        for rule, tuning in self.tunings.items():
            tried, missing = tuning.look()
            values[rule] = None if missing or not tried else best_of(tried).values
        return {
            (rule, seed): replace(
                with_values(self.place(rule, self.name(rule, seed)), chosen), seed=seed
            )
            for seed in self.seeds
            for rule in self.rules
            if (chosen := values.get(rule, {})) is not None
        }

    def unfinished(self) -> list[RunConfig]:
        """Return the runs, those that only try values included, that can be made next."""
        return [*self.waiting(), *(run for run in self.runs().values() if not finished(run))]

    def finished_runs(self) -> list[tuple[str, RunConfig]]:
        """Return rule and config of each compared run that is finished."""
        return [(rule, config) for (rule, _), config in self.runs().items() if finished(config)]

    def run(
        self,
        task: Task,
        *,
        rules: Sequence[str] = (),
        jobs: int = 1,
        on_trials: Callable[[], object] = lambda: None,
        on_done: Callable[[], object] = lambda: None,
    ) -> None:
        """Make the runs that are not finished, ``jobs`` at a time.

        ``rules`` are those to run; none: all. ``on_trials`` is called when all trials are done, and
        ``on_done`` after each run. Raises ``RuntimeError`` at the end, with the runs that failed.
        """
        failed: list[RuntimeError] = []
        wanted = [rule for rule in self.rules if not rules or rule in rules]
        later = len(wanted) * len(self.seeds)
        broken: set[RunConfig] = set()  # whose rules have no choice; the others go on
        while waiting := [config for config in self.waiting(rules) if config not in broken]:
            work = {config: task(config, True) for config in waiting}
            try:
                run_all(work, jobs=jobs, later=later, on_done=on_done)
            except RuntimeError as error:
                failed.append(error)
                broken.update(config for config in waiting if not finished(config))
        on_trials()
        work = {
            config: task(config, False)
            for (rule, _), config in self.runs().items()
            if rule in wanted
        }
        try:
            run_all(work, jobs=jobs, on_done=on_done)
        except RuntimeError as error:
            failed.append(error)
        if len(failed) == 1:
            raise failed[0]
        if failed:
            raise RuntimeError("; ".join(map(str, failed))) from failed[0]
