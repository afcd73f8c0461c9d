"""FedBCD in the Flower App: defaults, comparison, results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from fl_strategies.core.settings_text import format_params, parse_params
from simulations.config import RunConfig
from simulations.lab.compare import main
from simulations.rules import configs_for


@pytest.mark.slow
def test_compare_runs_all_and_reports_the_time_and_own_accuracy(tmp_path: Path) -> None:
    line = "--dataset digits --partition shards --clients 10 --rounds 2 --seed 1"
    own = "--fraction-evaluate 1 --local-test 0.3"
    names = "fedbcd,fedbcd-i,fedbcd-async,fedbcd-i-async"
    main([*line.split(), *own.split(), "--algorithms", names, "--output", str(tmp_path)])
    for name in names.split(","):
        rows = (tmp_path / name / "history.jsonl").read_text().splitlines()
        first, second = (json.loads(row) for row in rows)
        assert 0.0 < first["virtual-seconds"] < second["virtual-seconds"]
        assert 0.0 <= second["own-accuracy"] <= 1.0
    for folder in (tmp_path / "fedbcd-async", tmp_path / "fedbcd-i-async"):
        model = load_file(folder / "model.safetensors")
        clouds = [load_file(file) for file in folder.glob("cloud-*.safetensors")]
        assert len(clouds) == 2  # the servers of both defaults on digits
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
