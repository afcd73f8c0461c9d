"""Who is served how well, and by which data it is measured."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from clients.node.in_process import InProcessGrid
from simulations.client_app import app
from simulations.config import RunConfig
from simulations.experiment import run as run_on
from simulations.experiment import run_in_process
from simulations.lab.compare import main
from simulations.lab.fairness import fairness
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


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


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


@pytest.mark.slow
def test_the_tables_are_those_of_the_runs_and_the_figure_is_drawn(tmp_path: Path) -> None:
    _, rows = run(tmp_path, algorithm="fedbc")
    (tmp_path / "out").mkdir()
    fairness({"mine": tmp_path / "run"}, tmp_path / "out")
    table = read(tmp_path / "out/fairness.csv")
    assert [row["round"] for row in table] == ["1", "2", "3"]
    for line, server_round in zip(table, (1, 2, 3), strict=True):
        mine = [row for row in rows if row["round"] == server_round]
        spread = np.var([row["eval-accuracy"] for row in mine])
        assert float(line["accuracy-variance"]) == pytest.approx(spread)
        trained = sorted((r for r in mine if "samples" in r), key=lambda row: row["samples"])
        assert sum(row["weight-share"] for row in trained) == pytest.approx(1.0)
        total = sum(row["lambda"] for row in trained)
        assert float(line["weight-smallest"]) == pytest.approx(trained[0]["lambda"] / total)
        assert float(line["data-largest"]) == pytest.approx(trained[-1]["data-share"])
    clients = read(tmp_path / "out/clients.csv")
    newest = {row["client"]: row["weight-share"] for row in rows if "weight-share" in row}
    assert {int(r["client"]): float(r["weight-share"]) for r in clients} == pytest.approx(newest)
    assert (tmp_path / "out/fairness.png").stat().st_size > 0


def test_fedavg_weighs_by_examples_or_alike(tmp_path: Path) -> None:
    _, rows = run(tmp_path, algorithm="fedavg")
    assert all(r["weight-share"] == r["data-share"] for r in rows if "weight-share" in r)
    _, rows = run(tmp_path, algorithm="fedavg", params="weights=uniform")
    assert {r["weight-share"] for r in rows if "weight-share" in r} == {1 / 3}


@pytest.mark.slow
def test_a_comparison_in_which_clients_evaluate_has_the_tables(tmp_path: Path) -> None:
    main(
        ["--dataset", "digits", "--clients", "10", "--rounds", "2", "--fraction", "0.3",
         "--fraction-evaluate", "1", "--local-test", "0.2", "--fine-tune", "train",
         "--algorithms", "fedavg,per-fedbc", "--output", str(tmp_path)]
    )  # fmt: skip
    assert {row["run"] for row in read(tmp_path / "fairness.csv")} == {"fedavg", "per-fedbc"}
    last = json.loads((tmp_path / "per-fedbc/history.jsonl").read_text().splitlines()[-1])
    assert {"own-accuracy", "tuned-accuracy", "own-tuned-accuracy"} <= last.keys()


def test_a_run_without_evaluating_clients_has_no_fairness(tmp_path: Path) -> None:
    run(tmp_path, algorithm="fedavg", **{"fraction-evaluate": 0.0})
    with pytest.raises(ValueError, match=r"no client evaluated in .*: set fraction-evaluate"):
        fairness({"mine": tmp_path / "run"}, tmp_path)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (["train"], "all 3 rounds of .* were skipped: nothing to measure"),
        (["train", "evaluate"], "no evaluation of a client could be used in .*: see its log"),
    ],
)
def test_a_run_whose_rounds_were_all_void_has_no_fairness(
    lost: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(request: Message, reply: Message) -> Message | None:
        return None if request.metadata.message_type in lost else reply

    config = RunConfig.parse(SYNTHETIC | {"output": str(tmp_path / "run"), "lost-rounds": 0})
    federation = InProcessGrid(app, 6, run_config=config.to_run_config(), fault=fault)
    with pytest.raises(RuntimeError, match="every round was skipped"):
        run_on(config, federation)
    with pytest.raises(ValueError, match=said):
        fairness({"mine": tmp_path / "run"}, tmp_path)
    assert not (tmp_path / "fairness.csv").exists()


def test_a_damaged_history_is_named_with_its_line(tmp_path: Path) -> None:
    run(tmp_path, algorithm="fedavg")
    history = tmp_path / "run/history.jsonl"
    history.write_text(history.read_text().replace('"round": 2', '"rovnd": 2'))
    with pytest.raises(
        ValueError, match=r"history\.jsonl is damaged in line 2: it is not an object"
    ):
        fairness({"mine": tmp_path / "run"}, tmp_path)


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
    ((_, targets),) = test.batches(np.random.default_rng(), 0)
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
