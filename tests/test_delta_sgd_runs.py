"""The study of Delta-SGD on MNIST: its settings and its table.

Mutants tried by hand, each caught. Here: no momentum, no decay, Delta-SGD for 100 rounds only, 600
rows a client; in the table all rounds for the first 100, no word of divergence or its last round,
unfinished cells shown, the first accuracy, the worst for the best, no row for 100 rounds.
In test_partitions: Gamma(alpha) uncorrected, its correction without 1/alpha, with alpha, with the
sign turned; classes that ran out still drawn, more rows than a class has, shares that underflow,
rows given twice, a row too few, bounds off by one, the option ignored. In test_models: either
dropout missing, of single pixels or of another rate; either of the last ReLUs missing; padding;
images of 15 pixels. In test_simulations: a test in every round, none in the last, callbacks called
without one, rounds counted by tests, the target's round off by one or counted by tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulations.config import RunConfig
from simulations.lab.reproduce import delta_sgd_table, run_cell
from simulations.lab.studies import Cell, delta_sgd_mnist


def test_every_cell_of_the_study_is_a_setting_that_runs() -> None:
    cells = {cell.name: cell for cell in delta_sgd_mnist()}
    assert len(cells) == 3 * 9
    for name, cell in cells.items():
        config = RunConfig.parse(cell.config)
        asked = config.strategy().request(config.rounds, 0)
        assert asked["lr"] == pytest.approx(config.lr / (100 if "-decay-" in name else 1))
        assert asked["momentum"] == (0.9 if name.startswith("sgdm") else 0.0)
        assert config.rounds == (500 if name.startswith("delta-sgd") else 100)
        assert config.partition_params == f"alpha={name.split('alpha')[1]} rows_per_client=500"


def test_the_studys_table_shows_accuracies_after_100_rounds_and_at_the_end(tmp_path: Path) -> None:
    small = {
        "dataset": "digits",
        "model": "logistic",
        "clients": 20,
        "partition-params": "alpha=0.1 rows_per_client=20",
    }

    def named(name: str, **others: object) -> Cell:
        (found,) = [cell for cell in delta_sgd_mnist() if cell.name == name]
        return Cell(name, found.config | small | others, None)

    cells = [
        named("sgd-alpha1", lr=1e38, rounds=4),  # soon no reply is finite
        named("delta-sgd-alpha1", rounds=105),
        named("sgd-alpha0.1", rounds=4, **{"evaluate-every": 2}),
        named("delta-sgd-alpha0.1", rounds=105),
    ]
    for cell in cells[:3]:
        run_cell(cell, tmp_path)
    lines = delta_sgd_table(cells, tmp_path).splitlines()
    rows = {tuple(line.split(" | ")[:2]): line.strip(" |").split(" | ")[2:] for line in lines}
    text = (tmp_path / "sgd-alpha1/history.jsonl").read_text().splitlines()
    used = [row["clients-used"] for row in map(json.loads, text)]
    assert rows["| sgd", "4"][0] == f"diverged in round {used.index(0) + 1}"
    for key, column, after, name in (
        (("| sgd", "4"), 1, 4, "sgd-alpha0.1"),
        (("| delta-sgd", "100"), 0, 100, "delta-sgd-alpha1"),
        (("| delta-sgd", "105"), 0, 105, "delta-sgd-alpha1"),
    ):
        text = (tmp_path / name / "history.jsonl").read_text().splitlines()[:after]
        tested = [row["test-accuracy"] for row in map(json.loads, text) if "test-accuracy" in row]
        best = f"(best {100 * max(tested):.1f} %)"
        assert rows[key][column] == f"{100 * tested[-1]:.1f} % {best}"
    assert rows["| delta-sgd", "105"][1] == rows["| delta-sgd", "100"][1] == "not run"
