"""Who is served how well, and by which data it is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.figures import read_history
from simulations.problems import dataset, parts, problem

SYNTHETIC: dict[str, Any] = {
    "dataset": "synthetic",
    "clients": 6,
    "fraction": 0.5,
    "rounds": 3,
    "epochs": 1,
    "fraction-evaluate": 1.0,
}


def run(tmp_path: Path, **others: Any) -> tuple[RunConfig, list[dict[str, Any]]]:
    config = RunConfig.parse(SYNTHETIC | {"output": str(tmp_path / "run")} | others)
    run_in_process(config)
    lines = (tmp_path / "run/clients.jsonl").read_text().splitlines()
    return config, [json.loads(line) for line in lines]


def test_a_naturally_partitioned_clients_own_test_rows_make_up_the_whole_test_set(
    tmp_path: Path,
) -> None:
    config, rows = run(tmp_path, algorithm="fedbc")
    found = dataset(config)
    last = [row for row in rows if row["round"] == 3]
    assert [row["eval-samples"] for row in last] == np.bincount(found.test_owner).tolist()
    pooled = np.average(
        [row["eval-accuracy"] for row in last], weights=[row["eval-samples"] for row in last]
    )
    history = (tmp_path / "run/history.jsonl").read_text().splitlines()
    assert json.loads(history[-1])["test-accuracy"] == pytest.approx(pooled)


def test_a_history_has_the_spread_and_the_weights_of_its_clients(tmp_path: Path) -> None:
    _, rows = run(tmp_path, algorithm="fedbc")
    history = read_history(tmp_path / "run/history.jsonl")
    for line in history:
        mine = [row for row in rows if row["round"] == line["round"]]
        spread = np.var([row["eval-accuracy"] for row in mine])
        assert line["eval-accuracy-variance"] == pytest.approx(spread)
        trained = sorted((r for r in mine if "samples" in r), key=lambda row: row["samples"])
        assert sum(row["weight-share"] for row in trained) == pytest.approx(1.0)
        total = sum(row["lambda"] for row in trained)
        assert line["weight-share-smallest"] == pytest.approx(trained[0]["lambda"] / total)
        assert line["data-share-largest"] == pytest.approx(trained[-1]["data-share"])
    assert [line["round"] for line in history] == [1, 2, 3]


def test_fedavg_weighs_by_examples_or_alike(tmp_path: Path) -> None:
    _, rows = run(tmp_path, algorithm="fedavg")
    assert all(r["weight-share"] == r["data-share"] for r in rows if "weight-share" in r)
    _, rows = run(tmp_path, algorithm="fedavg", params="weights=uniform")
    assert {r["weight-share"] for r in rows if "weight-share" in r} == {1 / 3}


def test_pooled_data_are_split_client_by_client_and_tested_on_all_that_is_held_out() -> None:
    config = RunConfig.parse(
        {"dataset": "digits", "partition": "power-law", "clients": 10, "pooled": True,
         "partition-params": "exponent=1.3 classes_per_client=2", "local-test": 0.2}
    )  # fmt: skip
    found, split = dataset(config), parts(config)
    assert len(found.y) == 1797
    held_out = np.concatenate([test for _, test in split])
    trained = np.concatenate([train for train, _ in split])
    assert np.array_equal(np.sort(np.concatenate([held_out, trained])), np.arange(1797))
    assert len(held_out) == pytest.approx(0.2 * 1797, abs=10)
    test = problem(config, "test")
    assert len(test) == len(held_out)
    ((_, targets, _),) = test.data.batches(np.random.default_rng(), 0)
    np.testing.assert_array_equal(targets, found.y[held_out])


def test_pooled_natural_data_keep_their_owners() -> None:
    config = RunConfig.parse(SYNTHETIC | {"pooled": True, "local-test": 0.2})
    plain = dataset(RunConfig.parse(SYNTHETIC))
    for client, (train, test) in enumerate(parts(config)):
        whole = np.concatenate([plain.y[plain.owner == client],
                                plain.test_y[plain.test_owner == client]])  # fmt: skip
        mine = dataset(config).y[np.concatenate([train, test])]
        assert np.array_equal(np.bincount(mine, minlength=10), np.bincount(whole, minlength=10))


@pytest.mark.parametrize("keys", [{"pooled": True}, {"fraction-evaluate": 0.5}])
def test_data_to_hold_out_are_asked_for(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs local-test > 0: clients need test data"):
        RunConfig.parse({"dataset": "digits", **keys})
