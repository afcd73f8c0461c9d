"""Runs on fewer nodes than clients, and where their states lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from safetensors.numpy import load_file

from clients import InProcessGrid
from simulations import client_app, population
from simulations.config import RunConfig
from simulations.experiment import run, run_in_process


def config_of(folder: Path, **keys: Any) -> RunConfig:
    usual = {"clients": 12, "rounds": 3, "fraction": 0.5, "epochs": 1, "output": str(folder)}
    return RunConfig.parse({**usual, **{n.replace("_", "-"): v for n, v in keys.items()}})


def model_of(config: RunConfig, **nodes: int) -> dict[str, np.ndarray]:
    grid = InProcessGrid(client_app.app, **nodes, run_config=config.to_run_config())
    run(config, grid, quiet=True)
    return load_file(Path(config.output) / "model.safetensors")


@pytest.mark.parametrize("algorithm", ["fedavg", "fedadmm"])
@pytest.mark.sampled("fedadmm")
def test_a_seed_fixes_the_model_however_many_nodes_there_are(
    algorithm: str, tmp_path: Path
) -> None:
    expected = model_of(config_of(tmp_path / "12", algorithm=algorithm), num_clients=12)
    one = config_of(tmp_path / "run", algorithm=algorithm)
    states = {"state_dir": str(tmp_path / "states")} if one.stateful else {}
    run_in_process(one, quiet=True)
    found = [
        load_file(tmp_path / "run" / "model.safetensors"),
        model_of(config_of(tmp_path / "5", algorithm=algorithm), num_clients=12, hosts=5),
        model_of(
            config_of(tmp_path / "2", algorithm=algorithm, **states),
            num_clients=2,
        ),
    ]
    for other in found:
        for name, array in expected.items():
            np.testing.assert_array_equal(other[name], array)


def test_a_node_hosts_what_its_node_config_lists_or_any_where_nodes_are_few() -> None:
    config = config_of(Path("/nowhere"))

    def hosted(**node: Any) -> Any:
        return population.hosted(config, Context(1, 1, node, RecordDict(), {}))

    assert hosted(**{"partition-id": 3, "num-partitions": 12}) is None
    assert hosted(**{"partition-id": 1, "num-partitions": 2}) == 12
    assert hosted(**{"hosts": "0-3 7", "num-partitions": 12}) == [0, 1, 2, 3, 7]
    assert hosted() is None
    with pytest.raises(ValueError, match="hosts must list ids and ranges"):
        hosted(hosts="all")


def test_states_that_nobody_named_a_place_for_go_with_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Ray: a worker takes the folder that the server has made, and no other."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(population, "on_a_ray_worker", lambda: True)
    config = config_of(tmp_path / "out", algorithm="fedadmm")
    context = Context(7, 1, {"partition-id": 3, "num-partitions": 2}, RecordDict(), {})
    grid: Any = type("Ray", (), {"run": type("Run", (), {"run_id": 7})})()
    with pytest.raises(ValueError, match="must share a state-dir"):
        population.worker_states(config, context)
    with population.shared_states(config, grid, shared=True):
        states = population.worker_states(config, context)
        assert states is not None
        assert states.parent.stat().st_mode & 0o777 == 0o700
    assert not states.parent.exists()


@pytest.mark.slow
def test_what_is_wrong_with_the_data_of_hosts_is_told_before_the_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, partition="dirichlet", partition_params="alpha=0.001", clients=99)
    grid = InProcessGrid(client_app.app, 99, hosts=2, run_config=config.to_run_config())
    with pytest.raises(ValueError, match=r"cannot be made: .*client \d+ is left without"):
        population.shared_population(config, grid)
