"""Device mistakes and GPU settings, found out without a GPU (``emulated_gpu``).

Faults put in by hand, each caught here, are in ``FAULTS``; mutants tried beside them: `is_cuda` in
``replay`` (the xpu and mps rows), ``manual_seed`` of the CPU alone, the model of ``prepare`` on the
run's device, ``check_device`` in ``RunConfig.check``, a share of 1 / workers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import SAMPLE
from emulated_gpu import EmulatedGPU, on_a_client, on_gpu
from laws import PLAIN_STEPS
from torch import Tensor

from clients import Batch, Border, keeping
from clients.learning.problem import Problem
from fl_strategies import STRATEGIES
from simulations import client_app, experiment, problems, results
from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.results import Summary

SMALL: dict[str, Any] = {
    "partition": "iid",
    "clients": 2,
    "rounds": 2,
    "fraction": 1.0,
    "batch-size": 20,
    "lr": 0.05,
    "momentum": 0.0,
    "epochs": 1,
    "steps": 3,
}
OWN_STEPS: dict[str, Any] = {
    "batch-size": -1,
    "lr": -1.0,
    "momentum": -1.0,
    "epochs": -1,
    "steps": 0,
}
"""The defaults: settings that an algorithm with steps of its own has no use for."""
SOLVERS = ("sgd", "adam", "adagrad", "delta-sgd", "sps", "RMSprop")


def rotated(number: int, algorithm: str) -> dict[str, Any]:
    """Return the model, with dropout or with running statistics, and the solver of a row."""
    model = {"model": ("mlp-authors", "cnn-bn")[number % 2]}
    if algorithm in PLAIN_STEPS:
        return model
    return model | {"solver": SOLVERS[number % 6]}


ROWS: list[tuple[str, dict[str, Any]]] = [
    *((algorithm, rotated(number, algorithm)) for number, algorithm in enumerate(STRATEGIES)),
    ("fedavg", {"solver": "lbfgs", "steps": 0, "batch-size": 0}),
    ("fedpd-vr", {"params": "inner_steps=3 inner_batch=4 full_every=1"}),
    ("per-fedavg", {"params": "meta_gradient=first-order"}),
    ("scaffold", {"params": "option=I"}),
    ("fedbc", {"local-test": 0.3, "fraction-evaluate": 1.0, "fine-tune": "train"}),
    ("fedadmm", {"gradient-norm": "true", "penalty": 0.1, "residual": 0.0, "momentum": 0.9}),
    ("fedavg", {"autocast": "bfloat16"}),
    ("fedavg", {"dtype": "bfloat16"}),
    ("fedadmm", {"model": "mlp", "stack": "2"}),
]


@pytest.fixture(autouse=True)
def nothing_is_cached() -> Iterator[None]:
    """Forget the data and models that a process places on its device once."""
    caches = (problems.placed, problems.shared_model, client_app.parsed)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def settings(algorithm: str, folder: Path, **others: Any) -> dict[str, Any]:
    keys = SMALL | {"algorithm": algorithm, "output": str(folder)}
    if algorithm == "fedsgd":
        keys |= {"batch-size": 0, "steps": 1}
    if algorithm == "proxskip":
        keys |= {"steps": 0}
    if not STRATEGIES[algorithm].uses_local:
        keys |= OWN_STEPS
    if STRATEGIES[algorithm]().overlaps:
        keys |= {"clients": 6}
    return keys | {name.replace("_", "-"): value for name, value in others.items()}


def run(algorithm: str, folder: Path, gpu: EmulatedGPU | None = None, **others: Any) -> Summary:
    """Run on the CPU, or on an emulated GPU."""
    device = "cpu" if gpu is None else gpu.device.type
    for cache in (problems.placed, problems.shared_model, client_app.parsed):
        cache.cache_clear()
    with gpu or nullcontext():
        keys = settings(algorithm, folder, device=device) | others
        return run_in_process(RunConfig.parse(keys))


@pytest.mark.sampled("fedadmm")
@pytest.mark.parametrize(("algorithm", "keys"), ROWS, ids=str)
def test_a_run_on_a_gpu_is_the_run_on_the_cpu(
    algorithm: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    keys = {"model": "mlp-authors"} | keys
    on_cpu = run(algorithm, tmp_path / "cpu", **keys)
    on_gpu = run(algorithm, tmp_path / "gpu", EmulatedGPU(), **keys)
    assert on_gpu.model_sha256 == on_cpu.model_sha256
    assert (on_gpu.server_device, [*on_gpu.client_devices]) == ("cuda", ["cuda"])


WITHOUT_WAITING: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *(
        (name, {"steps": 2}, {"steps": 7})
        for name, strategy in STRATEGIES.items()
        if name in SAMPLE | {"ditto", "moon", "q-fedavg"} and strategy.uses_local
    ),
    *(
        ("fedavg", {"solver": solver, "steps": 2}, {"solver": solver, "steps": 7})
        for solver in ("adam", "delta-sgd", "sps", "RMSprop")
    ),
    ("fedavg", {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "steps": 7}),
    ("pfedme", {"params": "inner_steps=2"}, {"params": "inner_steps=9"}),
    ("per-fedbc", {"params": "inner_steps=2"}, {"params": "inner_steps=6"}),
    (
        "fedpd-vr",
        {"params": "inner_steps=2 inner_batch=4"},
        {"params": "inner_steps=9 inner_batch=4"},
    ),
]
"""Runs that differ in their number of local steps alone, all within one epoch."""


@pytest.mark.parametrize(("algorithm", "few", "many"), WITHOUT_WAITING, ids=str)
@pytest.mark.sampled
def test_the_host_waits_for_the_gpu_as_often_whatever_the_number_of_local_steps(
    algorithm: str, few: dict[str, Any], many: dict[str, Any], tmp_path: Path
) -> None:
    waits, launches = [], []
    for number, keys in enumerate((few, many)):
        gpu = EmulatedGPU()
        run(algorithm, tmp_path / str(number), gpu, **{"model": "mlp-authors", "rounds": 1, **keys})
        waits.append((gpu.to_host, gpu.to_device, gpu.reads))
        launches.append(gpu.launches)
    assert waits[0] == waits[1]
    assert launches[0] < launches[1]


# ---- faults that no run on a CPU shows ----------------------------------------------------------


def labels_stay(self: Problem, model: Border, loss: Any, x: Tensor, y: Tensor, **k: Any) -> None:
    initialise(self, model, loss, x, y, **k)
    self.tensors.targets = y.cpu()


def state_stays(state_type: Any, fields: Any, like: Tensor) -> Any:
    state = from_fields(state_type, fields, like)
    return type(state)(*(v.cpu() if isinstance(v, Tensor) else v for v in state))


def mask_of_the_host(self: torch.nn.Dropout, x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full(x.shape, 0.5))


initialise, from_fields = Problem.__init__, keeping.from_fields
FAULTS: dict[str, tuple[str, dict[str, Any], Callable[[], AbstractContextManager[Any]]]] = {
    "labels stay on the CPU": (
        "fedavg",
        {},
        lambda: mock.patch.object(Problem, "__init__", labels_stay),
    ),
    "a state read back stays on the CPU": (
        "fedadmm",
        {},
        lambda: mock.patch.object(keeping, "from_fields", state_stays),
    ),
    "an upload is read where it lies": (
        "fedavg",
        {"rounds": 3},  # after as many without a usable reply the run ends with the cause
        lambda: mock.patch(
            "clients.learning.border.to_host", lambda found: [t.numpy() for t in found]
        ),
    ),
    "masks are drawn on the CPU": (
        "fedavg",
        {},
        lambda: mock.patch.object(torch.nn.Dropout, "forward", mask_of_the_host),
    ),
    "the GPU's generator is not put back": (
        "fedavg",
        {"solver": "delta-sgd"},
        lambda: mock.patch("clients.learning.replay._draws_from", return_value=None),
    ),
    "the GPU's generator is not seeded": (
        "fedavg",
        {},
        lambda: mock.patch(
            "clients.base.seed_generators",
            lambda seed, device: torch.default_generator.manual_seed(seed),
        ),
    ),
}


def causes(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


@functools.cache
def without_fault(algorithm: str, **keys: Any) -> str:
    with TemporaryDirectory() as folder:
        return run(algorithm, Path(folder), **keys).model_sha256


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows_on_the_gpu_and_on_no_cpu(fault: str, tmp_path: Path) -> None:
    algorithm, keys, patch = FAULTS[fault]
    keys = {"model": "mlp-authors"} | keys
    right = without_fault(algorithm, **keys)
    with patch():
        if "masks" not in fault:
            assert run(algorithm, tmp_path / "cpu", **keys).model_sha256 == right
        try:
            seen = run(algorithm, tmp_path / "gpu", EmulatedGPU(), **keys)
            noticed = seen.model_sha256 != right
        except Exception as error:
            noticed = any("same device" in why or "to numpy" in why for why in causes(error))
    assert noticed


def test_operands_on_both_sides_are_refused_and_those_cuda_takes_are_not() -> None:
    with EmulatedGPU() as gpu:
        here, there = torch.ones(3, device="cuda"), torch.ones(3)
        for mixed in (lambda: here + there, lambda: there.add_(here), lambda: here @ there):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        with pytest.raises(TypeError, match="numpy"):
            here.numpy()
        fine = [
            here + torch.tensor(2.0),
            here[torch.tensor([0, 2])],
            here[:2],
            here.cpu() + there,
        ]
        assert [str(t.device) for t in fine] == ["cuda:0", "cuda:0", "cuda:0", "cpu"]
    assert on_gpu(here)
    assert (gpu.to_host, gpu.to_device) == (1, 1)  # `here.cpu()`, the index


def test_launches_are_operators_and_syncs_are_copies_and_reads() -> None:
    with EmulatedGPU() as gpu:
        x = torch.ones(4).to("cuda")
        assert (gpu.launches, gpu.syncs) == (0, 1)
        (x.view(2, 2) * 2).add_(1)
        assert (gpu.launches, gpu.syncs) == (2, 1)
        float(x[0])
        x[x > 0]
        assert (gpu.reads, gpu.to_host, gpu.to_device) == (2, 0, 1)


# ---- devices of server and clients --------------------------------------------------------------


def test_clients_on_the_cpu_of_a_server_on_a_gpu_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where Flower's simulation hides the GPU from its workers."""
    progress = results.Progress(RunConfig.parse({"output": str(tmp_path)}), tmp_path)
    progress.server_device = "cuda"
    caplog.clear()
    progress.note_devices({0: "cuda", 1: "cpu", 2: "cpu"})
    told = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "fl_strategies"]
    assert told[0] == ("INFO", "the server computes on cuda, clients on cpu (2), cuda (1)")
    assert told[1][0] == "WARNING"
    assert "2 clients compute on the CPU, the server on cuda" in told[1][1]
    assert "client-resources-num-gpus" in told[1][1]
    progress.note_devices({0: "cuda", 1: "cpu", 2: "cpu", 3: "cpu"})
    assert len([r for r in caplog.records if r.name == "fl_strategies"]) == len(told)  # once
    summary = progress.save(finished=False)
    assert (summary.server_device, summary.client_devices) == ("cuda", {"cpu": 3, "cuda": 1})


def test_where_all_compute_alike_nothing_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for gpu in (None, EmulatedGPU()):
        caplog.clear()
        run("fedavg", tmp_path, gpu)
        kind = gpu.device.type if gpu else "cpu"
        messages = [r.getMessage() for r in caplog.records]
        assert f"the server computes on {kind}, clients on {kind} (2)" in messages
        assert not [m for m in messages if "compute on the CPU" in m]
        stored = json.loads((tmp_path / "summary.json").read_text())
        assert (stored["server_device"], stored["client_devices"]) == (kind, {kind: 2})


@pytest.mark.parametrize("kind", ["cuda", "cuda:1", "xpu", "mps"])
def test_a_server_without_a_gpu_takes_clients_on_one(kind: str, tmp_path: Path) -> None:
    """Only a process that is to compute there refuses, and says where it is."""
    config = RunConfig.parse(settings("fedavg", tmp_path, device=kind))
    assert config.torch_device.type == "cpu"
    experiment.prepare(config)
    for there in (lambda: run_in_process(config), lambda: on_a_client(config)):
        with pytest.raises(ValueError, match=f"device is '{kind}', which this process .* not see"):
            there()


@pytest.mark.parametrize("kind", ["gpu", "auto:1", "cuda:x", "meta", "", "cuda:"])
def test_an_unknown_device_is_refused_everywhere(kind: str) -> None:
    with pytest.raises(ValueError, match="device must be one of"):
        RunConfig.parse({"device": kind})


def test_a_server_on_the_cpu_and_clients_on_a_gpu_make_the_model_of_one_machine(
    tmp_path: Path,
) -> None:
    """The halves as two machines have them: requests travel from one to the other."""
    gpu, here = EmulatedGPU(), run("fedadmm", tmp_path / "cpu", model="mlp-authors")
    config = RunConfig.parse(
        settings("fedadmm", tmp_path / "both", device="cuda", model="mlp-authors")
    )
    answer = experiment.InProcessGrid.answer

    def on_the_clients_machine(self: Any, message: Any) -> Any:
        on_the_server = problems.shared_model, problems.placed
        problems.shared_model, problems.placed = of_the_client
        try:
            with gpu:
                return answer(self, message)
        finally:
            problems.shared_model, problems.placed = on_the_server

    of_the_client = tuple(
        functools.lru_cache(cached.__wrapped__)
        for cached in (problems.shared_model, problems.placed)
    )
    client_app.parsed.cache_clear()
    grid = experiment.InProcessGrid(
        client_app.app, config.clients, run_config=config.to_run_config()
    )
    with mock.patch.object(experiment.InProcessGrid, "answer", on_the_clients_machine):
        both = experiment.run(config, grid)
    assert (both.server_device, both.client_devices) == ("cpu", {"cuda": 2})
    assert both.model_sha256 == here.model_sha256
    torch.use_deterministic_algorithms(False)  # the process of the clients goes on here
    torch.backends.cudnn.deterministic = False


# ---- flags ------------------------------------------------------------------------------------


def test_what_a_seed_fixes_is_computed_by_deterministic_algorithms_on_a_gpu(
    tmp_path: Path,
) -> None:
    seen: list[tuple[bool, bool, bool]] = []

    def flags() -> tuple[bool, bool, bool]:
        cudnn = torch.backends.cudnn
        deterministic = torch.are_deterministic_algorithms_enabled()
        return deterministic, cudnn.deterministic, cudnn.benchmark

    gradient, before = Problem.gradient, flags()

    def noted(self: Problem, batch: Batch) -> Any:
        seen.append(flags())
        return gradient(self, batch)

    with mock.patch.object(Problem, "gradient", noted):
        run("fedavg", tmp_path, EmulatedGPU())
        assert set(seen) == {(True, True, False)}
        assert flags() == before
        seen.clear()
        run("fedavg", tmp_path)
        assert set(seen) == {before}
