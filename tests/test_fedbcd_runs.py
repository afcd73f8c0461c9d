"""FedBCD in the Flower App: defaults, comparison, results, the study."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from fl_strategies.core.settings_text import format_params, parse_params
from simulations.config import RunConfig
from simulations.lab.compare import main
from simulations.lab.reproduce import run_cell, table
from simulations.lab.studies import Cell, fedbcd_mnist
from simulations.rules import configs_for


def test_compare_runs_all_three_and_reports_the_time_and_own_accuracy(tmp_path: Path) -> None:
    line = "--dataset digits --partition shards --clients 10 --rounds 2 --seed 1"
    own = "--fraction-evaluate 1 --local-test 0.3"
    names = "fedbcd,fedbcd-i,fedbcd-async"
    main([*line.split(), *own.split(), "--algorithms", names, "--output", str(tmp_path)])
    for name in names.split(","):
        rows = (tmp_path / name / "history.jsonl").read_text().splitlines()
        first, second = (json.loads(row) for row in rows)
        assert 0.0 < first["virtual-seconds"] < second["virtual-seconds"]
        assert 0.0 <= second["own-accuracy"] <= 1.0
    model = load_file(tmp_path / "fedbcd-async" / "model.safetensors")
    clouds = [load_file(file) for file in (tmp_path / "fedbcd-async").glob("cloud-*.safetensors")]
    assert len(clouds) == 2  # the servers of async FedBCD's defaults on digits
    for name, array in model.items():
        assert array == pytest.approx(sum(cloud[name] for cloud in clouds) / 2, abs=1e-6)


def test_clients_that_the_cloud_servers_do_not_divide_are_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="servers must divide the number of clients, 20, got 3"):
        configs_for(["fedbcd"], ["servers=3"], {"clients": 20}, tmp_path)


def test_no_box_survives_the_way_to_the_apps() -> None:
    assert parse_params(format_params({"box": None, "gamma": 4.0})) == {"box": None, "gamma": 4.0}
    config = RunConfig.parse({"algorithm": "fedbcd", "params": "box=none"})
    assert config.strategy().request(1, 0)["box"] == 0.0


def test_every_cell_of_the_study_is_a_setting_that_runs() -> None:
    cells = fedbcd_mnist()
    assert len({cell.name for cell in cells}) == len(cells) == 24
    for cell in cells:
        config = RunConfig.parse(cell.config)
        assert config.strategy().fraction_train in (0.3, 0.6)


def test_the_studys_table_has_accuracies_own_accuracy_and_virtual_time(tmp_path: Path) -> None:
    small = {"dataset": "digits", "clients": 20, "rounds": 2, "epochs": 1, "model": "logistic"}
    cells = [
        Cell(cell.name, cell.config | small, cell.patience, (1, 2))
        for cell in fedbcd_mnist()
        if cell.name in ("diversity6-active3-async-0.5", "diversity6-active3-sync-authors")
    ]
    for cell in cells:
        run_cell(cell, tmp_path)
    lines = table(cells, tmp_path).splitlines()
    assert lines[0].endswith("| accuracy at 1 | accuracy at 2 | own accuracy | virtual s |")
    assert len(lines) == 4
    for cell, line in zip(cells, lines[2:], strict=True):
        rows = (tmp_path / cell.name / "history.jsonl").read_text().splitlines()
        last = json.loads(rows[-1])
        shown = [text.strip() for text in line.strip("|").split("|")]
        assert shown[6] == f"{100 * last['test-accuracy']:.2f} %"
        assert shown[7] == f"{100 * last['own-accuracy']:.2f} %"
        assert shown[8] == f"{last['virtual-seconds']:.0f}"
