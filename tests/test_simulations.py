"""The Flower App: its run-config, its results, its command line."""

from __future__ import annotations

import json
import logging
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_runs import SMALL, small
from trials import ROOT

from clients import StateError, client_app
from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, RoundInfo, cosine_decay, step_decay
from fl_strategies.core.settings_text import format_params, parse_params
from simulations.client_app import app
from simulations.config import RunConfig
from simulations.experiment import metrics_of, run, run_in_process
from simulations.figures import read_history
from simulations.results import Summary


def test_the_apps_run_config_has_every_key_with_its_default() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config == RunConfig().to_run_config()


@pytest.mark.parametrize("algorithm", ["fedadmm", "fedbcd-async"])
def test_the_same_seed_gives_the_same_model_twice_and_another_seed_another(
    algorithm: str, tmp_path: Path
) -> None:
    given = {"clients": 10, "rounds": 2, "fraction": -1.0}  # the default of each
    config = small(tmp_path, algorithm=algorithm, steps=20, **given)  # more than an epoch
    first, again = run_in_process(config), run_in_process(config)
    other = run_in_process(replace(config, seed=2))
    assert first.model_sha256 == again.model_sha256 != other.model_sha256


@pytest.mark.figures
def test_a_run_writes_its_results_and_prints_their_absolute_path_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path, target=0.3)
    summary = run_in_process(config)
    folder = tmp_path / "run"
    assert capsys.readouterr().out.splitlines()[-1] == f"results: {folder}"
    assert RunConfig(**json.loads((folder / "config.json").read_text())) == config
    assert Summary(**json.loads((folder / "summary.json").read_text())) == summary
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    accuracies = [row["test-accuracy"] for row in rows]
    assert summary.final_accuracy == accuracies[-1]
    assert summary.best_accuracy == max(accuracies)
    reached = [r for r, accuracy in enumerate(accuracies, 1) if accuracy >= 0.3]
    assert summary.rounds_to_target == (reached[0] if reached else None)
    assert summary.bytes_up == sum(row["bytes-up"] for row in rows)
    assert sum(array.size for array in load_file(folder / "model.safetensors").values()) == 650
    assert (folder / "curve.png").stat().st_size > 0


def test_metrics_of_is_a_run_that_prints_nothing_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_process(small(tmp_path, steps=2, **{"batch-size": 7}))
    expected = read_history(tmp_path / "run/history.jsonl")
    capsys.readouterr()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    rows = metrics_of(**SMALL, steps=2, batch_size=7)
    assert [row["test-loss"] for row in rows] == [row["test-loss"] for row in expected]
    assert capsys.readouterr().out == ""
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("quiet", [True, False])
def test_a_quiet_run_logs_nothing_that_is_only_informative(
    quiet: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run_in_process(small(tmp_path, algorithm="fedbc", steps=1), quiet=quiet)
    assert (caplog.records == []) == quiet


def test_an_interrupted_run_leaves_what_was_computed_so_far(tmp_path: Path) -> None:
    def interrupt(info: RoundInfo) -> None:
        if info.server_round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_process(small(tmp_path, steps=1), [interrupt])
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["rounds"], summary["finished"]) == (2, False)
    assert len((folder / "history.jsonl").read_text().splitlines()) == 2
    assert load_file(folder / "model.safetensors")


def test_a_run_may_stop_at_its_target(tmp_path: Path) -> None:
    summary = run_in_process(small(tmp_path, target=0.01, **{"stop-at-target": True}))
    assert (summary.rounds, summary.rounds_to_target) == (1, 1)


def test_models_may_be_tested_in_every_nth_round_and_in_the_last(tmp_path: Path) -> None:
    """As if the other rounds' tests were struck out: training is the same."""
    summaries, histories = [], []
    for every in (1, 2):
        config = small(tmp_path, rounds=5, steps=2, target=0.01, **{"evaluate-every": every})
        summaries.append(run_in_process(config))
        lines = (tmp_path / "run/history.jsonl").read_text().splitlines()
        histories.append([json.loads(line) for line in lines])
    each, some = histories
    assert ["test-loss" in row for row in some] == [False, True, False, True, True]
    for t in (1, 3, 4):
        for name in ("test-loss", "test-accuracy"):
            assert some[t][name] == each[t][name]
    assert [row["train-loss"] for row in some] == [row["train-loss"] for row in each]
    first, second = summaries
    assert second.model_sha256 == first.model_sha256
    assert (second.rounds, first.rounds_to_target, second.rounds_to_target) == (5, 1, 2)
    assert second.final_accuracy == first.final_accuracy
    assert second.best_accuracy == max(each[t]["test-accuracy"] for t in (1, 3, 4))


def test_a_target_is_looked_for_where_models_are_tested(tmp_path: Path) -> None:
    keys = {"stop-at-target": True, "evaluate-every": 2, "steps": 1}
    assert run_in_process(small(tmp_path, rounds=5, target=0.01, **keys)).rounds == 2


def test_the_last_exchange_is_tested_where_rounds_are_skipped(tmp_path: Path) -> None:
    keys = {"algorithm": "fedpd", "params": "eta=1 p=0.5", "fraction": 1.0, "evaluate-every": 100}
    run_in_process(small(tmp_path, rounds=12, clients=5, steps=1, **keys))
    rows = [json.loads(row) for row in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    assert 1 < len(rows) < 12
    assert ["test-loss" in row for row in rows] == [False] * (len(rows) - 1) + [True]


def test_clients_may_evaluate_on_data_of_their_own(tmp_path: Path) -> None:
    config = small(tmp_path, steps=1, **{"local-test": 0.2, "fraction-evaluate": 0.5})
    run_in_process(config)
    row = json.loads((tmp_path / "run/history.jsonl").read_text().splitlines()[0])
    assert row["eval-clients-used"] == 10
    assert 0.0 <= row["own-accuracy"] <= 1.0
    assert row["eval-accuracy-min"] <= row["eval-accuracy"] <= row["eval-accuracy-max"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"algoritm": "fedavg"},
            r"unknown run-config keys 'algoritm' \(did you mean 'algorithm'\?\); known",
        ),
        ({"algorithm": "fedsvrg"}, r"unknown algorithm 'fedsvrg'.*; known: .*'fedavg'"),
        ({"dataset": "no-such-set"}, "no-such-set"),
        ({"model": "resnet-1000"}, r"unknown model 'resnet-1000'; known: logistic, "),
        ({"partition": "sorted"}, r"unknown partition 'sorted'.*; known: iid, "),
        ({"solver": "newton"}, r"unknown solver 'newton'; known: "),
        ({"params": "rho=0"}, r"rho must be > 0, got 0"),
        ({"params": "mu=1"}, r"fedadmm has no hyperparameter 'mu'.*; it has \['rho', 'eta', "),
        ({"params": "rho"}, r"an option is given as name=value, got 'rho'"),
        ({"evaluate-every": 0}, r"evaluate-every must be an integer >= 1, got 0"),
        ({"lost-state": "restart"}, r"lost-state must be one of .*, got .restart."),
        ({"state-dir": "my/state_dir"}, r"must be an absolute path, got 'my/state_dir'"),
        ({"fraction": 1.5}, r"fraction must be > 0 and <= 1, got 1.5"),
        ({"clients": 5000}, r"clients must be from 1 to 1437 \(samples\), got 5000"),
        (
            {"partition": "diversity", "partition-params": "labels=9"},
            r"partition 'diversity' has no option 'labels'; it has",
        ),
        ({"partition-params": "seed=9"}, "partition 'shards' has no option 'seed'"),
        ({"partition-params": "owner=9"}, "partition 'shards' has no option 'owner'"),
        ({"dataset-params": "normalise=own"}, "data set 'digits' has no option 'normalise'"),
        ({"model-params": "seed=9"}, "model 'logistic' has no option 'seed'; it has none"),
        (
            {"clients": 1000},
            r"shards_per_client must be .* 1 to 1 \(1437 samples over 1000 clients\), got 2",
        ),
        ({"rounds": 0}, r"rounds must be an integer >= 1, got 0"),
        ({"timeout": 0.0}, r"timeout must be > 0, got 0.0"),
        ({"rounds": "three"}, r"rounds must be of type int, got 'three'"),
        ({"momentum": True}, r"momentum must be of type float, got True"),
        ({"state-dir": "here"}, r"state-dir must be an absolute path, got 'here'"),
        ({"fraction-evaluate": 0.5}, r"fraction-evaluate > 0 needs local-test > 0"),
        ({"dtype": "int8"}, r"dtype must be one of \['float32', 'float64', 'bf.*, got 'int8'"),
        ({"device": "cuda"}, r"device is 'cuda', which this process .* does not see"),
        ({"output": "/proc/results"}, r"the results folder /proc/results cannot be written"),
        ({"solver": "adagrad", "momentum": 0.9}, r"solver 'adagrad' has no momentum"),
        ({"steps": 10**7}, r"max-steps must be >= the local .* 10,000,000 or more, got 1,000,000"),
    ],
)
def test_bad_input_is_refused_before_any_round(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rounds: list[RoundInfo] = []
    with pytest.raises(ValueError, match=message):
        run_in_process(RunConfig.parse({"output": str(tmp_path / "run")} | keys), [rounds.append])
    assert rounds == []


def test_a_state_directory_of_another_algorithm_or_model_is_refused(tmp_path: Path) -> None:
    state = {"state-dir": str(tmp_path / "state"), "steps": 1}
    run_in_process(small(tmp_path, **state))
    with pytest.raises(StateError, match="not of 'fedadmm'"):
        run_in_process(small(tmp_path, model="mlp", **state))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("algorithm", "dataset"),
    [
        *((name, "synthetic") for name in STRATEGIES),
        *(pytest.param("fedadmm", name, marks=pytest.mark.slow) for name in ("mnist", "cifar10")),
    ],
)
@pytest.mark.parametrize("datasets_folder", ["few"], indirect=True)
def test_every_default_is_a_setting_that_runs(
    algorithm: str, dataset: str, datasets_folder: Path, tmp_path: Path
) -> None:
    given = {"clients": 10, "rounds": 1, "fraction": -1.0}
    if STRATEGIES[algorithm].uses_local and algorithm != "proxskip":
        given["steps"] = 1
    config = small(tmp_path, algorithm=algorithm, dataset=dataset, **given)
    if config.fraction < 1.0:
        config = replace(config, fraction=0.2)
    assert run_in_process(config).finished


def test_a_default_takes_the_place_of_no_value_that_is_given() -> None:
    given = {"algorithm": "fedbabu", "fraction-evaluate": 1.0, "local-test": 0.2}
    for epochs in (0, 2):
        config = RunConfig.parse({**given, "fine-tune-epochs": epochs})
        assert config.fine_tune_epochs == epochs
    assert RunConfig.parse(given).fine_tune_epochs == 5
    assert RunConfig.parse(RunConfig.parse(given).to_run_config()).fine_tune_epochs == 5


def test_params_survive_the_way_to_the_apps_and_back() -> None:
    params = {"rho": {1: 0.01, 40: 0.1}, "eta": "fraction", "tracking": "global"}
    assert parse_params(format_params(params)) == params


def test_the_number_of_nodes_must_be_that_of_clients(tmp_path: Path) -> None:
    config = small(tmp_path)
    with pytest.raises(ValueError, match=r"clients=20, but 21 nodes are connected: flwr run "):
        run(config, InProcessGrid(app, 21, run_config=config.to_run_config()))


def test_a_run_in_which_every_client_fails_says_why(tmp_path: Path) -> None:
    config = small(tmp_path)

    def broken(context: Any) -> Any:
        raise OSError("no data here")

    with pytest.raises(RuntimeError, match=r"of 3 rounds in a row was usable: .* OSError: no data"):
        run(config, InProcessGrid(client_app(broken), 20, run_config=config.to_run_config()))


def test_numbers_of_a_run_config_may_be_integers_where_floats_are_due() -> None:
    assert RunConfig.parse({"lr": 1}).lr == 1.0
    assert isinstance(RunConfig.parse({"lr": 1}).lr, float)
    assert np.isclose(RunConfig.parse({"fraction": 1}).fraction, 1.0)


@pytest.mark.parametrize(("p", "rounds"), [(0.5, 40), (0.99, 1)])
def test_the_rate_decays_over_the_exchanges_in_which_schedules_are_read(
    p: float, rounds: int
) -> None:
    keys = {"algorithm": "fedpd", "params": f"p={p}", "rounds": rounds, "lr": 0.4}
    strategy = RunConfig.parse(keys | {"lr-decay": "step"}).strategy()
    communications = strategy.communication_rounds(strategy.state, rounds)
    assert communications < rounds
    assert strategy.local["lr"] == step_decay(0.4, max(communications, 1))
    along_a_cosine = RunConfig.parse(keys | {"lr-decay": "cosine to=0.002"}).strategy()
    assert along_a_cosine.local["lr"] == cosine_decay(0.4, 0.002, max(communications, 1))
    for text, message in (
        ("cosin to=0.1", r"lr-decay must be one of \['step', 'linear', 'cosine', 'exponential'\]"),
        ("cosine", "step has no option, others have one, to=0.001, got 'cosine'"),
        ("step to=0.1", "step has no option, others have one, to=0.001, got 'step to=0.1'"),
        ("linear to=0", "lr-decay: to must be > 0, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            RunConfig.parse(keys | {"lr-decay": text})
