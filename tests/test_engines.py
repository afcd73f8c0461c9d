"""One Strategy, several engines: the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fl_strategies.core.files import read_lines
from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.lab import demo
from simulations.lab.superlink import flwr_run

ROOT = Path(__file__).parents[1]
FORKING = """
import os
import threading

from flwr.app import Context, RecordDict

from simulations import server_app
from simulations.generated import synthetic


class SimulationGrid:
    pull_interval = 0.1


def run(config, grid):
    for _ in range(3):
        synthetic(clients=100)


server_app.run = run
context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
thread = threading.Thread(target=server_app.app, args=(SimulationGrid(), context))
thread.start()
while thread.is_alive():
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
"""
"""A ServerApp that makes data while the main thread starts processes by fork, as Ray does."""

SETTINGS = {
    "algorithms": "fedadmm",
    "model": "cnn1",
    "clients": "8",
    "rounds": "3",
    "fraction": "0.5",
    "random-epochs": "true",
    "epochs": "2",
    "momentum": "0.5",
    "lr": "0.05",
    "server-step": "adam lr=0.002",
    "compression": "topk share=0.2",
    "download": "bfloat16",
}
NAME = "fedadmm+download=bfloat16+topk+adam"


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_tests_that_start_ray_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist marks the group by the end of the test's name."""
    workers = hasattr(request.config, "workerinput")
    assert not workers or request.node.nodeid.endswith("@ray")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")  # one at a time: each takes all cores
def test_the_demo_ends_with_a_table_and_ray_gives_the_in_process_model(tmp_path: Path) -> None:
    """FedADMM, so that state is kept too; a CNN on real images of digits, so that threads count.

    The rest is as the demo has it. PyTorch's kernels of a convolution may round otherwise in
    another process, which in this run moves the model by less than 1e-7; one other draw, step or
    code moves it by more than 1e-4.
    """
    options = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
    ray, in_process = tmp_path / "ray", tmp_path / "here"
    command = [sys.executable, "-m", "simulations.lab.demo", *options, "--output", str(ray)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == f"results: {ray}"
    assert lines[-3].startswith(f"| {NAME} |")
    assert any("round 3/3" in line for line in lines)
    demo.main([*options, "--engine", "in-process", "--output", str(in_process)])
    runs = [folder / NAME for folder in (ray, in_process)]
    assert all(json.loads((run / "summary.json").read_text())["finished"] for run in runs)
    on_ray, here = (read_lines(run / "clients.jsonl") for run in runs)
    assert [pytest.approx(row, rel=1e-4) for row in here] == on_ray
    models = [load_file(run / "model.safetensors") for run in runs]
    for name, array in models[0].items():
        np.testing.assert_allclose(array, models[1][name], rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_serverapp_makes_its_data_while_processes_are_forked() -> None:
    """With more than one thread of BLAS it waits for ever in every such run."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "4"}
    command = [sys.executable, "-W", "ignore", "-c", FORKING]
    subprocess.run(command, env=environment, timeout=180, check=True)


@pytest.mark.release
@pytest.mark.xdist_group("ray")
def test_asynchronous_training_by_the_clock_is_the_same_on_ray(tmp_path: Path) -> None:
    config = RunConfig.parse(
        {
            "algorithm": "fedadmm",
            "params": "eta=fraction",
            "pace": "buffered size=2 concurrency=4",
            "model": "logistic",
            "clients": 8,
            "rounds": 8,
            "partition": "imbalanced",
            "clock": "clock step=0.01 spread=1 jitter=0.5 upload=1 dropout=0.2",
            "availability": "markov on=4 off=2",
            "output": str(tmp_path / "ray"),
        }
    )
    flwr_run(config.to_run_config(), num_supernodes=8, workers=1, on_line=lambda line: None)
    on_ray = json.loads((tmp_path / "ray/summary.json").read_text())
    here = run_in_process(replace(config, output=str(tmp_path / "here")))
    assert on_ray["model_sha256"] == here.model_sha256
    rows = [read_lines(tmp_path / folder / "history.jsonl") for folder in ("ray", "here")]
    names = ("virtual-seconds", "clients-used", "clients-dropped", "reply-age", "test-loss")
    numbers_on_ray, numbers_here = ([[row.get(n) for n in names] for row in run] for run in rows)
    assert numbers_on_ray == numbers_here
    assert sum(row["clients-dropped"] for row in rows[0]) > 0
    assert max(row.get("oldest-reply", 0.0) for row in rows[0]) >= 1
