"""Worker processes of the in-process engine: any number gives the same model, and one may die."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import SAMPLE
from flwr.app import ArrayRecord, Context
from laws import START, TABLE, local
from problems import make_client_app, quadratics, to_record, to_vector
from tiny_data import cifar100
from torch import nn

from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    InProcessGrid,
    Problem,
    client_app,
    client_id,
)
from clients.node import host
from clients.node.packing import PackedApp, unpacked
from clients.stacking.fit import fit_all
from fl_strategies import FedADMM, FedAvg, FederatedStrategy
from fl_strategies.parts import Buffered, Clock
from simulations import problems
from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.handed import app_with_data

CLIENTS = 5


COMMON: dict[str, Any] = {"local": local(), "seed": 3}
ASYNCHRONOUS = {"clock": Clock(spread=1.0), "pace": Buffered(size=2, concurrency=4)}
RULES: dict[str, Callable[[], FederatedStrategy]] = {
    row.name: partial(row.strategy, **COMMON, fraction_train=0.6)
    for row in TABLE
    if row.name in SAMPLE | {"a-fedpd"}
} | {"asynchronous": partial(FedADMM, **COMMON, **ASYNCHRONOUS, eta="fraction")}


def records_of(grid: InProcessGrid) -> dict[int, list[str]]:
    """Return the names of the records in each client's state, of those that have some."""
    states = {c.node_config["partition-id"]: [*c.state] for c in grid.client_contexts()}
    return {client: names for client, names in states.items() if names}


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_model(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Algorithms of each mechanism on one grid after the other's clients: their states travel, too.

    The third grid has two hosts, whose clients' states travel with them. Three workers are on a
    system without files in memory, as macOS.
    """
    if workers == 3:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    app = make_client_app(quadratics(CLIENTS))
    hosts = [[4, 0, 2], [3, 1]]
    host = make_client_app(
        quadratics(CLIENTS), hosts=lambda context: hosts[int(context.node_config["partition-id"])]
    )
    grids = [
        InProcessGrid(app, CLIENTS),
        InProcessGrid(app, CLIENTS, workers=workers),
        InProcessGrid(host, CLIENTS, hosts=2, workers=workers),
    ]
    for name, made in RULES.items():
        for grid in grids:
            for context in grid.client_contexts():
                context.state.clear()
        start = to_record(START)
        alone, *others = (to_vector(made().start(grid, start, 4).arrays) for grid in grids)
        for shared in others:
            np.testing.assert_array_equal(alone, shared, name)
        expected, *found = map(records_of, grids)
        for states in found:
            assert states == expected, name


def of_a_page(fatal: int = -1, hosts: Any = None) -> Any:
    """Return the app of a page: data and a model that all clients share are in the closure."""
    inputs = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    targets = (inputs.sum(1) > 0).long()
    model = Border(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2)))
    first = os.getpid()

    def client_fn(context: Context) -> AnyAlgorithmClient:
        me = client_id(context)
        if me == fatal and os.getpid() != first:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.set_num_threads(1)
        rows = slice(15 * me, 15 * me + 15)
        problem = Problem(model, nn.functional.cross_entropy, inputs[rows], targets[rows])
        return AnyAlgorithmClient(problem, client_id=me, test=problem, store=ContextStore(context))

    return client_app(client_fn, hosts=hosts)


def initial() -> ArrayRecord:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2))
    return ArrayRecord(module.state_dict())


def run(grid: InProcessGrid, **options: Any) -> Any:
    strategy = FedADMM(fraction_evaluate=1.0, local={"lr": 0.1, "epochs": 2}, **options)
    return strategy.start(grid, initial(), num_rounds=3)


@pytest.mark.xdist_group("workers")
def test_what_the_app_holds_goes_to_workers_and_a_run_ends_with_no_process_left() -> None:
    grid = InProcessGrid(of_a_page(), 4, workers=2)
    processes = [worker.process.pid for worker in grid._workers._workers]
    shared, alone = run(grid), run(InProcessGrid(of_a_page(), 4))
    for ours, theirs in zip(shared.arrays.values(), alone.arrays.values(), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    assert shared.evaluate_metrics_clientapp == alone.evaluate_metrics_clientapp
    assert all(map(psutil.pid_exists, processes))
    file = grid._workers._app.file
    assert os.fstat(file.fileno()).st_nlink == 0  # no name, so nobody has to remove it
    del grid
    assert not any(map(psutil.pid_exists, processes))
    assert file.closed


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
def test_a_worker_that_dies_costs_its_client_alone(caplog: pytest.LogCaptureFixture) -> None:
    grid = InProcessGrid(of_a_page(fatal=2), 4, workers=2)
    strategy = FedAvg(local={"lr": 0.1}, fraction_evaluate=0.0)
    strategy.start(grid, initial(), num_rounds=2)
    assert strategy.run.faults == {2: "the worker process died (SIGKILL)"}
    deaths = caplog.text.count("a worker process died (SIGKILL); another one starts")
    assert deaths == 3  # asked for a description, and in two rounds


@pytest.mark.xdist_group("workers")
def test_what_cannot_run_says_why() -> None:
    app = of_a_page()
    with pytest.raises(ValueError, match="workers must be an integer >= 1, got 0"):
        InProcessGrid(app, 4, workers=0)
    lock = threading.Lock()

    def client_fn(context: Context) -> Any:
        raise RuntimeError(lock)

    with pytest.raises(ValueError, match="client_app cannot be sent to worker processes"):
        InProcessGrid(client_app(client_fn), 4, workers=2)


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
def test_a_worker_that_dies_costs_a_host_its_message_and_no_states() -> None:
    hosts = [[0, 3], [1, 2]]
    app = of_a_page(fatal=2, hosts=lambda context: hosts[context.node_config["partition-id"]])
    grid = InProcessGrid(app, 4, hosts=2, workers=2)
    strategy = FedADMM(local={"lr": 0.1}, fraction_evaluate=0.0)
    strategy.start(grid, initial(), num_rounds=2)
    assert strategy.run.faults == dict.fromkeys([1, 2], "the worker process died (SIGKILL)")
    assert {client: bool(grid.clients[client].state) for client in range(4)} == {
        0: True, 1: False, 2: False, 3: True,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
def test_an_app_that_workers_cannot_import_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os\nfrom test_workers import of_a_page\napp = of_a_page()\n"
    (tmp_path / "app_of_workers.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    grid = InProcessGrid("app_of_workers:app", 4, workers=2)
    assert len(run(grid).train_metrics_clientapp) == 3
    (tmp_path / "app_of_workers.py").unlink()
    grid = InProcessGrid("app_of_workers:app", 4, workers=2)
    with pytest.raises(RuntimeError, match=r"a worker process cannot start: .*app_of_workers"):
        run(grid)


@pytest.fixture
def images(tmp_path: Path) -> RunConfig:
    """A run on coloured images, which do not lie in memory as their indices say."""
    keys = {"dataset": str(cifar100(tmp_path / "images")), "model": "logistic", "clients": 3}
    return RunConfig.parse({**keys, "algorithm": "scaffold", "rounds": 3})


def test_workers_are_handed_the_samples_and_read_no_files(
    images: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "HANDED", {})
    expected = problems.dataset(images).inputs()
    initial = ArrayRecord(problems.fresh_model(images).state_dict())
    packed = PackedApp(app_with_data(images))
    assert len(packed.data) < expected.nbytes / 10
    monkeypatch.setattr(problems, "_dataset", None)
    app = unpacked(packed.file.fileno(), packed.data)
    grid = InProcessGrid(app, 3, run_config=images.to_run_config())
    FedAvg().start(grid, initial, 1)
    ((handed, _),) = problems.HANDED.values()
    np.testing.assert_array_equal(handed.inputs(), expected)
    assert handed.inputs().strides == expected.strides


def test_workers_stack_as_many_clients_as_the_run_says(
    images: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stack may give the same bits as clients alone: what is asked for tells."""
    asked: list[object] = []

    def noted(*given: Any, stack: object) -> Any:
        asked.append(stack)
        return fit_all(*given, stack=stack)  # type: ignore[arg-type]

    monkeypatch.setattr(host, "fit_all", noted)
    monkeypatch.setattr(problems, "HANDED", {})
    config = replace(images, algorithm="fedavg", stack="2")
    packed = PackedApp(app_with_data(config))
    app = unpacked(packed.file.fileno(), packed.data)
    grid = InProcessGrid(app, 3, hosts=1, run_config=config.to_run_config())
    initial = ArrayRecord(problems.fresh_model(config).state_dict())
    FedAvg(shared_population=3).start(grid, initial, 1)
    assert asked == [2]


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
def test_a_simulation_gives_the_same_model_with_workers(images: RunConfig, tmp_path: Path) -> None:
    """Two workers have hosts of three clients; with three, each client is a node."""
    hashes = set()
    for workers in (1, 2, 3):
        config = replace(images, output=str(tmp_path / f"{workers}"))
        hashes.add(run_in_process(config, workers=workers, quiet=True).model_sha256)
    assert len(hashes) == 1
