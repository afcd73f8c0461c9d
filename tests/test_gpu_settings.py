"""How GPUs are shared out, what touches them, machines, bfloat16, generators and flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from emulated_gpu import EmulatedGPU, on_a_client
from flwr.app import ArrayRecord
from laws import Row, one_of_each_mechanism
from torch import Tensor, nn

from clients import CLIENTS, AnyAlgorithmClient, Border, ContextStore, Problem, client_app
from clients import client_id as id_of
from clients.keeping import to_fields
from clients.learning.replay import Generators, kept_generators, seed_generators
from clients.node.in_process import InProcessGrid
from simulations import client_app as flower_app
from simulations import experiment, population, problems
from simulations.config import RunConfig
from simulations.lab import compare, runs
from simulations.lab.runs import run_one
from simulations.lab.superlink import flwr_run, gpu_share

# ---- shares of GPUs ---------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", range(1, 9))
def test_every_worker_fits_and_no_gpu_has_more_of_them_than_it_must(gpus: int) -> None:
    for workers in range(1, 130):
        share = gpu_share(workers, gpus)
        most = min(int(1 / share), workers)  # as Ray fills one GPU before the next
        assert most <= max(-(-workers // gpus), 1)
        assert int(gpus / share) >= workers  # as Flower counts the workers that fit
        assert share == round(share, 4) <= 1.0  # as Ray counts


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_ray_gives_two_workers_on_two_gpus_one_each(tmp_path: Path) -> None:
    """Ray is told of GPUs that do not exist, and asked as ``compare --workers 2`` asks."""
    asked: dict[str, Any] = {}
    with (
        EmulatedGPU(),
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(runs, "flwr_run", side_effect=lambda *a, **k: asked.update(k)),
    ):
        (config,) = compare.configs_for(["fedavg"], [], {"device": "cuda"}, tmp_path)
        run_one(config, engine="ray", workers=2)
    done = subprocess.run(
        [sys.executable, "-c", WORKERS, str(asked["gpus"])],
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "300"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["0", "1"]


WORKERS = """
import json, os, sys, tempfile
import ray
from flwr.simulation.ray_transport.ray_actor import pool_size_from_resources

with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False,
             _temp_dir=folder)
    wants = {"num_cpus": 1, "num_gpus": float(sys.argv[1])}

    class Worker:
        def gpu(self):
            return os.environ.get("CUDA_VISIBLE_DEVICES")

    count = pool_size_from_resources(wants)
    workers = [ray.remote(Worker).options(**wants).remote() for _ in range(count)]
    print(json.dumps(sorted(ray.get([worker.gpu.remote() for worker in workers]))), flush=True)
    ray.shutdown()
"""


def test_without_a_gpu_none_is_asked_for(tmp_path: Path) -> None:
    with mock.patch.object(runs, "flwr_run") as started:
        (config,) = compare.configs_for(["fedavg"], [], {}, tmp_path)
        run_one(config, engine="ray", workers=2)
    assert started.call_args.kwargs["gpus"] == 0.0


# ---- what touches a GPU -----------------------------------------------------------------------


@pytest.mark.parametrize("engine", compare.ENGINES)
def test_compare_validates_models_without_touching_the_gpu(engine: str, tmp_path: Path) -> None:
    with EmulatedGPU() as gpu:
        names = ["fedavg", "fedadmm", "moon"]
        configs = compare.configs_for(names, [], {"model": "cnn-bn", "device": "cuda"}, tmp_path)
        compare.Comparison(configs, tmp_path, engine=engine, seeds=[1, 2])
        assert (gpu.launches, gpu.syncs) == (0, 0)
        problems.shared_model.cache_clear()
        problems.shared_model(configs[0])  # which a run does
        assert gpu.to_device > 0
    problems.shared_model.cache_clear()


@pytest.mark.parametrize("engine", compare.ENGINES)
def test_compare_refuses_a_device_that_its_machine_lacks(engine: str, tmp_path: Path) -> None:
    configs = compare.configs_for(["fedavg"], [], {"device": "cuda"}, tmp_path)
    with pytest.raises(ValueError, match=r"device is 'cuda', which .* does not see"):
        compare.Comparison(configs, tmp_path, engine=engine)


def test_describing_a_model_reads_nothing_from_its_device() -> None:
    with EmulatedGPU() as gpu:
        model = Border(nn.Linear(2, 3).to("cuda"))
        assert (gpu.to_host, gpu.reads) == (0, 0)
        assert model.layout.signature == Border(nn.Linear(2, 3)).layout.signature


# ---- several machines -------------------------------------------------------------------------


def test_commands_that_start_a_ray_refuse_to_join_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "RAY_ADDRESS is '10.0.0.1:6379', but .* unset RAY_ADDRESS"
    with pytest.raises(ValueError, match=reason):
        flwr_run({}, num_supernodes=2, env={"RAY_ADDRESS": "10.0.0.1:6379"})
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    configs = compare.configs_for(["fedavg"], [], {}, tmp_path)
    with pytest.raises(ValueError, match=reason):
        flwr_run({}, num_supernodes=2)
    with pytest.raises(ValueError, match=reason):
        compare.Comparison(configs, tmp_path, engine="ray")
    compare.Comparison(configs, tmp_path, engine="in-process")  # which starts none


def test_workers_on_ray_need_the_servers_own_state_directory(tmp_path: Path) -> None:
    """A worker on another machine may find another folder, or none, by the same name."""
    folder = tmp_path / "states"
    keys: dict[str, Any] = {"algorithm": "fedadmm", "clients": 3, "rounds": 1, "fraction": 1.0}
    keys |= {"output": str(tmp_path / "out"), "state-dir": str(folder)}
    config = RunConfig.parse(keys)
    with mock.patch.object(population, "on_a_ray_worker", return_value=True):
        with pytest.raises(ValueError, match=r"state-dir .* is another folder on .* must share a"):
            on_a_client(config)
        on_a_client(RunConfig.parse(keys | {"state-dir": ""}))  # states travel with the messages
        on_a_client(RunConfig.parse(keys | {"algorithm": "fedavg", "state-dir": ""}))  # keeps none
        summary = experiment.run_in_process(config)  # where it is the server's
    assert (summary.finished, summary.client_devices) == (True, {"cpu": 3})
    on_a_client(config)  # a SuperNode has a directory of its own
    left = [path.name for path in (folder / "fedadmm").iterdir()]
    assert population.SHARED not in left


# ---- bfloat16 ---------------------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_a_bfloat16_model_travels_as_float32_and_comes_back_to_the_bit() -> None:
    model = Border(small().to(torch.bfloat16))
    arrays = model.arrays(model.vector)
    assert model.layout == Border(small()).layout
    for name, array in zip(model.names, arrays, strict=True):
        assert array.dtype == model.layout.dtypes[name] != np.dtype(object)
        kept = model.module.state_dict()[name]
        assert torch.equal(torch.from_numpy(array).to(kept.dtype), kept)
    again = Border(small().to(torch.bfloat16))
    nn.init.zeros_(again.vector)
    assert torch.equal(again.load(arrays), model.vector)
    assert again.vector.dtype == torch.bfloat16


def test_the_initial_model_is_the_modules_state_dict_with_numpys_types() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        model = Border(small().to(dtype))
        record = ArrayRecord(model.state_dict())
        assert list(record) == model.names
        assert {n: a.numpy().dtype for n, a in record.items()} == model.layout.dtypes
        for name, array in zip(model.names, model.arrays(model.vector), strict=True):
            np.testing.assert_array_equal(record[name].numpy(), array)
        before = model.vector.clone()
        for tensor in model.state_dict().values():
            tensor.zero_()  # copies
        assert torch.equal(model.vector, before)


def test_what_clients_keep_of_a_bfloat16_model_comes_back_to_the_bit() -> None:
    vector = torch.randn(50).to(torch.bfloat16)
    state = CLIENTS["fedadmm"].state_type
    assert state is not None
    count = len(state._fields)  # type: ignore[attr-defined]
    fields = to_fields(state(*([vector] * count)))
    assert all(torch.equal(torch.from_numpy(f).to(vector), vector) for f in fields.values())


@one_of_each_mechanism
def test_every_algorithm_trains_a_bfloat16_model_beside_float32_ones(row: Row) -> None:
    """Client 0 computes in bfloat16, the others and the server in float32."""
    rng = np.random.default_rng(0)
    centres = 3 * rng.normal(size=(3, 5))
    labels = [rng.integers(0, 3, 12) for _ in range(4)]
    inputs = [centres[y] + rng.normal(size=(12, 5)) for y in labels]
    types: set[torch.dtype] = set()

    def client_fn(context: Any) -> AnyAlgorithmClient:
        i = id_of(context)
        model = Border(small().to(torch.float32 if i else torch.bfloat16))
        types.add(model.vector.dtype)
        x, y = torch.tensor(inputs[i], dtype=torch.float32), torch.tensor(labels[i])
        problem = Problem(model, nn.functional.cross_entropy, x, y)
        return AnyAlgorithmClient(problem, client_id=i, store=ContextStore(context), test=problem)

    model = Border(small().to(torch.bfloat16))
    settings = {"epochs": 2, "lr": 0.05, "batch-size": 0}
    strategy = row.strategy(local=settings, fraction_evaluate=1.0)
    federation = InProcessGrid(client_app(client_fn), 4)
    result = strategy.start(federation, ArrayRecord(model.state_dict()), 4)
    assert types == {torch.bfloat16, torch.float32}
    assert {m["clients-used"] for m in result.train_metrics_clientapp.values()} == {4}
    losses = [m["eval-loss"] for m in result.evaluate_metrics_clientapp.values()]
    assert losses[-1] < losses[0]
    assert {n: a.numpy().dtype for n, a in result.arrays.items()} == model.layout.dtypes


# ---- generators -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_masks_of_any_device_are_drawn_again_from_its_own_generator(kind: str) -> None:
    with EmulatedGPU(kind):
        x = torch.ones(64, device=kind)
        seed_generators(3, x.device)
        generators = Generators.of([x])
        first, host = torch.bernoulli(x / 2), torch.rand(8)
        assert not torch.equal(torch.bernoulli(x / 2).cpu(), first.cpu())
        generators.restore()
        assert torch.equal(torch.bernoulli(x / 2).cpu(), first.cpu())
        assert torch.equal(torch.rand(8), host)
        with kept_generators([x]):
            after = torch.bernoulli(x / 2).cpu()
        assert torch.equal(torch.bernoulli(x / 2).cpu(), after)


def test_a_device_without_generator_is_computed_on() -> None:
    with kept_generators([torch.ones(2, device="meta")]):
        assert torch.rand(2, device="meta").shape == (2,)


# ---- flags ------------------------------------------------------------------------------------


@pytest.mark.parametrize("operators", ["conv", "rnn"])
def test_second_derivatives_leave_cudnns_flags_as_the_user_set_them(operators: str) -> None:
    """``torch.backends.cudnn.flags`` cannot read them once ``fp32_precision`` was set."""
    cudnn = torch.backends.cudnn
    module = torch.nn.Sequential(
        torch.nn.LSTM(3, 4, batch_first=True), Last(), torch.nn.Linear(4, 2)
    )
    problem = Problem(
        Border(module),
        torch.nn.functional.cross_entropy,
        torch.randn(5, 6, 3),
        torch.tensor([0, 1, 0, 1, 1]),
    )
    problem.model.module.train()
    v = torch.ones_like(problem.model.vector)
    plain = problem.hessian_product(problem.data.whole, v)
    before = getattr(cudnn, operators).fp32_precision, cudnn.deterministic, cudnn.enabled
    try:
        getattr(cudnn, operators).fp32_precision = "ieee"
        cudnn.deterministic = True
        forward, enabled = Problem.forward, []

        def noted(self: Problem, x: Tensor, y: Tensor) -> Any:
            enabled.append((cudnn.enabled, cudnn.deterministic))
            return forward(self, x, y)

        with mock.patch.object(Problem, "forward", noted):
            product = problem.hessian_product(problem.data.whole, v)
        assert enabled == [(False, True)]
        after = getattr(cudnn, operators).fp32_precision, cudnn.deterministic, cudnn.enabled
        assert after == ("ieee", True, before[2])
    finally:
        getattr(cudnn, operators).fp32_precision, cudnn.deterministic, cudnn.enabled = before
    assert torch.equal(product, plain)


class Last(torch.nn.Module):
    """The last of a recurrent layer's outputs."""

    def forward(self, outputs: Any) -> Tensor:
        last: Tensor = outputs[0][:, -1]
        return last


def test_a_run_that_does_not_fit_its_gpu_is_refused_with_the_numbers(tmp_path: Path) -> None:
    """Logistic regression on digits: 1,797 samples of 64 numbers, 650 parameters, batches of 8."""
    config = RunConfig.parse(
        {"device": "cuda", "model": "logistic", "partition": "iid", "clients": 3, "batch-size": 8,
         "output": str(tmp_path)}
    )  # fmt: skip
    with EmulatedGPU() as gpu:
        flower_app.check_memory.cache_clear()
        gpu.free = 460_000
        with pytest.raises(
            ValueError, match=r"some 0\.5 MB on cuda, where 0\.5 are free"
        ) as caught:
            flower_app.check_memory(config)
        for part in ("data 0.5", "parameters 0.0", "state 0.0", "batch 0.0", "smaller model"):
            assert part in str(caught.value)
        gpu.free = 600_000
        flower_app.check_memory(config)
        flower_app.check_memory.cache_clear()
        at_once = replace(config, stack="auto", fraction=1.0)
        gpu.free = 550_000
        with pytest.raises(ValueError, match=r"stack 0\.1"):
            flower_app.check_memory(at_once)
    flower_app.check_memory.cache_clear()
    flower_app.check_memory(replace(config, device="cpu"))
