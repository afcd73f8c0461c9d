"""The choice of hyperparameters: by a grid and by Optuna, seeded, with one budget, resumable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import compare

from simulations.config import RunConfig
from simulations.lab import runs, tuning
from simulations.lab.tuners import TUNERS, Trial, Values, best_of, remark
from simulations.lab.tuning import Search, Tuning, named, spaces, tunable, with_values
from simulations.rules import configs_for

Score = Callable[[Values], float]
every_tuner = pytest.mark.parametrize("tuner", TUNERS)


def searched(
    config: RunConfig, space: dict[str, Any], score: Score, stop: int = 10**6, **search: Any
) -> tuple[list[Trial], Tuning]:
    """Return what a search tries where runs have these scores; at most ``stop`` runs are made."""
    made: dict[RunConfig, float] = {}

    def place(name: str) -> RunConfig:
        return config

    one = Tuning(place, config.algorithm, space, Search(**search))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "finished", lambda run: run in made)
        patch.setattr(tuning, "score", lambda run, own: made[run])
        values_of = {name: lambda run, name=name: value(run, name) for name in space}
        while (waiting := one.look()[1]) and len(made) < stop:
            for run in waiting:
                made[run] = score({name: of(run) for name, of in values_of.items()})
        return one.look()[0], one


def value(run: RunConfig, name: str) -> Any:
    return (vars(run) | tuning.parse_params(run.params))[name]


FEDADMM = RunConfig.parse({"algorithm": "fedadmm"})


def near(**best: float) -> Score:
    """Return a score with one maximum, by factors."""
    return lambda values: -sum(abs(tuning.math.log(values[n] / best[n])) for n in best)


@pytest.mark.parametrize(
    ("scores", "chosen", "said"),
    [
        ({1.0: 0.5, 0.01: 0.2, 0.1: 0.7}, 0.1, ""),
        ({1.0: 0.5, 0.01: 0.2, 0.1: 0.5, 3.0: 0.1}, 0.1, ""),
        (
            {1.0: 0.5, 0.01: 0.9},
            0.01,
            "lr is at the lower end: a smaller one may do better",
        ),
        (
            {1.0: 0.8, 0.01: 0.2},
            1.0,
            "lr is at the upper end: a larger one may do better",
        ),
        ({1.0: 0.5, 0.01: 0.5}, 0.01, "all trials have the same score"),
    ],
)
def test_the_best_is_chosen_the_smaller_of_equals_and_ends_of_the_grid_are_named(
    scores: dict[float, float], chosen: float, said: str
) -> None:
    tried, one = searched(FEDADMM, {"lr": [*scores]}, lambda values: scores[values["lr"]])
    assert [trial.values["lr"] for trial in tried] == sorted(scores)
    assert best_of(tried).values == {"lr": chosen}
    assert remark(one.domain, tried) == said


def test_a_grid_goes_on_beyond_the_end_at_which_the_choice_lies_and_then_around_it() -> None:
    space = {"lr": (0.001, 0.01), "rho": (0.1, 1.0)}
    tried, one = searched(FEDADMM, space, near(lr=0.3, rho=0.3), trials=14)
    values = [trial.values for trial in tried]
    assert values[:4] == [{"lr": a, "rho": b} for a in (0.001, 0.01) for b in (0.1, 1.0)]
    rates = [one["lr"] for one in values]
    assert rates.index(0.1) < rates.index(1.0)
    assert len(tried) == 14
    assert remark(one.domain, tried) == ""
    assert best_of(tried).values == {"lr": 0.178, "rho": 0.316}


def test_nothing_is_tried_that_the_algorithm_refuses_and_its_bound_is_no_end_of_the_grid() -> None:
    config = RunConfig.parse({"algorithm": "fedpd"})
    tried, one = searched(config, {"p": (0.0, 0.5)}, lambda v: -v["p"], trials=6)
    assert {trial.values["p"] >= 0.0 for trial in tried} == {True}
    assert (len(tried), best_of(tried).values, remark(one.domain, tried)) == (6, {"p": 0.0}, "")


def test_a_grid_above_the_budget_is_sampled_by_the_seed() -> None:
    space = {"lr": (0.01, 0.1, 1.0), "rho": (0.1, 1.0, 10.0)}
    drawn = [searched(FEDADMM, space, near(lr=0.1), trials=4, seed=seed)[0] for seed in (1, 1, 2)]
    assert [len(tried) for tried in drawn] == [4, 4, 4]
    first, again, other = ([trial.values for trial in tried] for tried in drawn)
    assert first == again != other


@every_tuner
def test_a_search_that_ended_early_continues_as_if_it_had_not(tuner: str) -> None:
    space = {"lr": (0.001, 1.0), "rho": (0.01, 10.0), "tracking": ("client", "global")}
    search = {"tuner": tuner, "trials": 14, "seed": 3}
    score = near(lr=0.02, rho=0.5)
    whole, _ = searched(FEDADMM, space, score, **search)
    assert len(whole) == 14
    for stop in (1, 9):
        part, _ = searched(FEDADMM, space, score, stop=stop, **search)
        assert stop <= len(part) < 14
        assert part == whole[: len(part)]


def test_optuna_stays_in_the_range_and_tells_whole_numbers_from_others() -> None:
    space = {"lr": (0.01, 1), "epochs": (1, 9), "local_start": ("client", "global")}
    tried, _ = searched(FEDADMM, space, near(lr=0.1), tuner="optuna", trials=20)
    for trial in tried:
        assert 0.01 <= trial.values["lr"] <= 1.0
        assert isinstance(trial.values["epochs"], int)
        assert 1 <= trial.values["epochs"] <= 9
        assert trial.values["local_start"] in ("client", "global")
    assert len({trial.values["lr"] for trial in tried}) > 10
    assert abs(tuning.math.log(best_of(tried).values["lr"] / 0.1)) < 0.7


def test_a_choice_of_optuna_near_an_end_of_its_range_is_marked() -> None:
    for best, end in ((1e-9, "lower"), (1e9, "upper")):
        tried, one = searched(
            FEDADMM, {"lr": (0.01, 1.0)}, near(lr=best), tuner="optuna", trials=12
        )
        assert f"lr is at the {end} end" in remark(one.domain, tried)


def test_an_algorithm_has_the_local_settings_that_it_uses(tmp_path: Path) -> None:
    configs = configs_for(["fedavg", "fedsgd", "fedpd-vr", "fedadmm"], [], {}, tmp_path)
    lists = {config.algorithm: tunable(config) for config in configs}
    assert {"lr", "epochs", "batch_size", "momentum", "weights"} <= {*lists["fedavg"]}
    assert "batch_size" not in lists["fedsgd"]
    assert "lr" not in lists["fedpd-vr"]
    found = spaces(configs, ["lr=0.1,1", "batch-size=5,10", "fedavg.lr=0.2,0.3", "rho=1,2"])
    assert found["fedavg"] == {"lr": (0.2, 0.3), "batch_size": (5, 10)}
    assert found["fedsgd"] == {"lr": (0.1, 1)}
    assert found["fedpd-vr"] == {}
    assert [*found["fedadmm"]] == ["lr", "batch_size", "rho"]


def test_each_trial_has_a_folder_of_its_own() -> None:
    close = [named({"lr": 0.12345671}), named({"lr": 0.12345672}), named({"lr": 0.1, "mu": 1.0})]
    assert close == ["lr0.12345671", "lr0.12345672", "lr0.1-mu1"]


def test_values_take_the_place_of_those_of_the_run() -> None:
    config = with_values(FEDADMM, {"rho": 0.3, "epochs": 2, "random_epochs": True})
    assert (value(config, "rho"), config.epochs, config.random_epochs) == (0.3, 2, "true")


def test_hyperparameters_of_parts_are_tuned_too(tmp_path: Path) -> None:
    configs = configs_for(["fedavg", "fedavg+adam"], ["adam.tau=0.1"], {}, tmp_path)
    found = spaces(configs, ["adam.lr=0.01,0.1", "lr=0.1,1"])
    assert [[*space] for space in found.values()] == [["lr"], ["lr", "adam.lr"]]
    config = with_values(configs[1], {"lr": 1, "adam.lr": 0.03})
    assert (config.lr, config.server_step) == (1.0, "adam lr=0.03 tau=0.1")
    with pytest.raises(ValueError, match="lr must be > 0, got 0"):
        spaces(configs, ["adam.lr=0,0.1"])


@pytest.mark.slow
def test_personalized_models_choose_what_the_global_model_does_not_show(tmp_path: Path) -> None:
    """Ditto's global model is FedAvg's, whatever lambda."""
    line = "--algorithms ditto --tune lam=0.05,5 --fraction-evaluate 1 --local-test 0.2 --quiet"
    line += " --partition shards --clients 5 --fraction 1 --rounds 2 --epochs 1"
    for by, apart in (("accuracy", False), ("own-accuracy", True)):
        compare(tmp_path / by, f"{line} --tune-by {by}")
        rows = json.loads((tmp_path / by / "tuning.json").read_text())
        assert (len({row["score"] for row in rows}) > 1) == apart
        said = "personalized models at the end" in (tmp_path / by / "tuning.md").read_text()
        assert said == apart
    with pytest.raises(SystemExit):
        compare(tmp_path / "none", "--algorithms ditto --tune lam=0.05,5 --tune-by own-accuracy")


@pytest.mark.slow
@every_tuner
def test_algorithms_have_one_budget_and_a_killed_comparison_resumes(
    tuner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"--algorithms fedavg,fedprox --tune lr=0.05,0.5 --tune mu=0.1,1 --tuner {tuner}"
    line += " --trials 5 --quiet"
    summaries = compare(tmp_path / "whole", line)
    rows = json.loads((tmp_path / "whole/tuning.json").read_text())
    for algorithm, summary in zip(("fedavg", "fedprox"), summaries, strict=True):
        mine = [row for row in rows if row["algorithm"] == algorithm]
        (chosen,) = [row for row in mine if row["chosen"]]
        assert len(mine) == 5
        assert chosen["score"] == max(row["score"] for row in mine)
        assert summary["lr"] == chosen["lr"]
        assert (chosen["mu"] is None) == (algorithm == "fedavg")
    text = (tmp_path / "whole/table.md").read_text()
    assert f"Each algorithm had the same budget of 5 trials, spent by {tuner}." in text

    plain, made = runs.run_in_process, list[str]()

    def until(config: RunConfig, **options: Any) -> None:
        if len(made) == 4:
            made.append("killed")
            raise KeyboardInterrupt
        made.append(config.output)
        plain(config, **options)

    monkeypatch.setattr(runs, "run_in_process", until)
    with pytest.raises(SystemExit):
        compare(tmp_path / "killed", line)
    again = compare(tmp_path / "killed", line)
    assert len(set(made)) == len(made)
    assert json.loads((tmp_path / "killed/tuning.json").read_text()) == rows
    assert [one["model_sha256"] for one in again] == [one["model_sha256"] for one in summaries]
