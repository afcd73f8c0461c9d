"""Local steps as CUDA graphs give the bits of local steps, on an emulated GPU that records them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cohorts import classified, smooth
from emulated_gpu import EmulatedGPU, on_a_client
from recorded_graphs import RecordedGraph, recorded_graphs
from torch import Tensor, nn

from clients import FlatModel, LocalTraining, Problem, solve
from clients.learning import graphs
from clients.learning.objective import Inputs
from fl_strategies.core.oracle import Solved
from fl_strategies.core.subproblem import Subproblem
from simulations import worker
from simulations.config import RunConfig
from simulations.experiment import run_in_process
from simulations.results import Summary

SMALL: dict[str, Any] = {
    "partition": "iid", "clients": 3, "rounds": 3, "fraction": 1.0, "batch-size": 100,
    "lr": 0.05, "momentum": 0.0, "epochs": 3, "model": "mlp-authors", "device": "cuda",
}  # fmt: skip
"""An epoch has four or five steps of 100 samples and a smaller one."""


@pytest.fixture(autouse=True)
def nothing_is_cached() -> Iterator[None]:
    yield
    forget()


def forget() -> None:
    for cache in (worker.placed, worker.worker_model, worker.parsed):
        cache.cache_clear()


def run(folder: Path, **keys: Any) -> tuple[Summary, list[RecordedGraph]]:
    """Run on an emulated GPU; return the summary and the graphs that were captured."""
    forget()
    settings = SMALL | {name.replace("_", "-"): value for name, value in keys.items()}
    with EmulatedGPU() as gpu, recorded_graphs(gpu) as made:
        config = RunConfig.parse(settings | {"output": str(folder)})
        return run_in_process(config), made


ROWS: list[tuple[dict[str, Any], int]] = [
    ({"algorithm": "fedavg"}, 1),  # with dropout
    ({"algorithm": "fedavg", "model": "cnn-bn"}, 1),
    ({"algorithm": "fedavg", "momentum": 0.9}, 1),
    ({"algorithm": "fedavg", "momentum": 0.9, "nesterov": True, "weight-decay": 0.01}, 1),
    ({"algorithm": "fedavg", "penalty": 0.1, "box": 0.05}, 1),
    ({"algorithm": "fedavg", "extrapolation": 0.3}, 1),
    ({"algorithm": "fedavg", "autocast": "bfloat16"}, 1),
    ({"algorithm": "fedavg", "lr-decay": True, "rounds": 4}, 3),  # a rate of its own each
    ({"algorithm": "fedadmm", "residual": 0.0}, 1),  # a slope, a pull and a centre
    ({"algorithm": "feddyn", "momentum": 0.9}, 1),
    ({"algorithm": "scaffold"}, 1),
    ({"algorithm": "ditto"}, 2),  # solves with a pull and without
    ({"algorithm": "fedpd"}, 1),
]


@pytest.mark.parametrize(("keys", "graphs_made"), ROWS, ids=str)
def test_a_run_of_graphs_is_the_run_without(
    keys: dict[str, Any], graphs_made: int, tmp_path: Path
) -> None:
    expected, none = run(tmp_path / "plain", **keys)
    found, made = run(tmp_path / "graphs", **keys, cuda_graph=True)
    assert not none
    assert found.model_sha256 == expected.model_sha256
    assert (tmp_path / "graphs/clients.jsonl").read_text() == (
        tmp_path / "plain/clients.jsonl"
    ).read_text()
    assert len(made) == graphs_made
    assert all(graph.replays > 2 * graphs.WARM for graph in made)


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm": "moon"},  # its loss holds features of one client
        {"algorithm": "fedavg", "solver": "adam"},
        {"algorithm": "fedavg", "batch-size": 0},
        {"algorithm": "pfedme"},
    ],
    ids=str,
)
def test_other_steps_are_not_captured(keys: dict[str, Any], tmp_path: Path) -> None:
    expected, _ = run(tmp_path / "plain", **keys, rounds=1)
    found, made = run(tmp_path / "graphs", **keys, rounds=1, cuda_graph=True)
    assert not made
    assert found.model_sha256 == expected.model_sha256


# ---- one solve ----------------------------------------------------------------------------------


def solved(problems: list[Problem], training: LocalTraining, repeats: int = 1) -> list[Solved]:
    """Return the solves of all problems, one after another, each with a slope of its own."""
    found = []
    for number, problem in enumerate(problems * repeats):
        like, rng = problem.model.vector, np.random.default_rng(number)
        start, slope, centre = (
            torch.from_numpy(rng.normal(size=len(like))).to(like) for _ in range(3)
        )
        found.append(solve(problem, start, Subproblem(slope, 0.3, centre), training, rng))
    return found


def on_a_gpu(module: nn.Module, **options: Any) -> list[Problem]:
    model = FlatModel(module, device="cuda", **options)
    return [
        Problem(model, p.loss, p.inputs, p.targets, rows=p.rows)
        for p in classified(smooth(torch.float32), sizes=(21, 12, 3, 33))
    ]


TRAINING = LocalTraining(batch_size=4, epochs=3, momentum=0.5)


def same(found: list[Solved], expected: list[Solved]) -> bool:
    return all(
        torch.equal(mine.w.cpu(), other.w.cpu())
        and float(mine.loss) == float(other.loss)
        and float(mine.accuracy) == float(other.accuracy)
        for mine, other in zip(found, expected, strict=True)
    )


def test_a_graph_serves_all_clients_of_a_model() -> None:
    """Each with its own start, slope, centre, velocity, samples and smaller last batch."""
    with EmulatedGPU() as gpu, recorded_graphs(gpu) as made:
        expected = solved(on_a_gpu(smooth(torch.float32)), TRAINING, 2)
        found = solved(on_a_gpu(smooth(torch.float32), cuda_graph=True), TRAINING, 2)
        assert same(found, expected)
    assert len(made) == 1
    whole = 2 * 3 * (5 + 3 + 8)  # batches of 4 samples; the first of a solve makes the velocity
    assert made[0].replays == whole - 2 * 3 - graphs.WARM


def test_a_replayed_step_is_a_launch_between_four_copies_whatever_the_depth() -> None:
    def launches(depth: int, epochs: int) -> int:
        hidden = [part for _ in range(depth) for part in (nn.Linear(4, 4), nn.Tanh())]
        with EmulatedGPU() as gpu, recorded_graphs(gpu):
            problem = on_a_gpu(nn.Sequential(*hidden, nn.Linear(4, 3)), cuda_graph=True)[1]
            training = LocalTraining(batch_size=4, epochs=epochs)
            solved([problem], training)
            before = gpu.launches
            solved([problem], training)
            return gpu.launches - before

    for depth in (1, 6):
        assert launches(depth, 9) - launches(depth, 8) == 3 * 5 + 3  # and to gather an epoch's


class Waiting(nn.Module):
    """Looks at a value while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = smooth(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out if bool(out.sum() > 0) else 2.0 * out


def test_what_cannot_be_captured_ends_the_solve_with_the_reason() -> None:
    with EmulatedGPU() as gpu, recorded_graphs(gpu):
        solved(on_a_gpu(Waiting()), TRAINING)
        said = r"cannot be a CUDA graph; train without cuda_graph: RuntimeError: CUDA error"
        with pytest.raises(RuntimeError, match=said):
            solved(on_a_gpu(Waiting(), cuda_graph=True), TRAINING)


class Scaled(Problem):
    """Its gradient is a client's own."""

    scale = 1.0

    def gradient(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        found = super().gradient(inputs, targets)
        self.model.gradient.mul_(self.scale)
        return found


def test_steps_on_a_problem_with_a_gradient_of_its_own_are_not_captured() -> None:
    def problems(**options: Any) -> list[Problem]:
        made: list[Problem] = []
        for number, one in enumerate(on_a_gpu(smooth(torch.float32), **options)):
            made.append(Scaled(one.model, one.loss, one.inputs, one.targets, rows=one.rows))
            made[-1].scale = 1.0 + number  # type: ignore[attr-defined]
        return made

    with EmulatedGPU() as gpu, recorded_graphs(gpu) as made:
        assert same(solved(problems(cuda_graph=True), TRAINING), solved(problems(), TRAINING))
    assert not made


def test_inputs_of_another_shape_run_as_without() -> None:
    def averaging() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Linear(4, 3))

    def problems(**options: Any) -> list[Problem]:
        made = on_a_gpu(averaging(), **options)
        other = made[3]
        wide = torch.cat([other.inputs, other.inputs.flip(0)], 1)
        return [*made, Problem(other.model, other.loss, wide, other.targets), *made]

    with EmulatedGPU() as gpu, recorded_graphs(gpu) as made:
        assert same(solved(problems(cuda_graph=True), TRAINING), solved(problems(), TRAINING))
    assert len(made) == 1


def test_a_model_keeps_its_latest_graphs() -> None:
    with EmulatedGPU() as gpu, recorded_graphs(gpu) as made:
        problems = on_a_gpu(smooth(torch.float32), cuda_graph=True)
        first = LocalTraining(batch_size=4, epochs=3, lr=0.5)
        solved(problems, first)
        for number in range(graphs.KEPT - 1):
            solved(problems, LocalTraining(batch_size=4, epochs=3, lr=0.01 + number / 100))
            solved(problems, first)
        assert len(made) == graphs.KEPT == len(problems[0].model.graphs or {})
        solved(problems, LocalTraining(batch_size=4, epochs=3, lr=1.0))
        assert len(problems[0].model.graphs or {}) == graphs.KEPT
        solved(problems, first)
        assert len(made) == graphs.KEPT + 1


# ---- the recorder -------------------------------------------------------------------------------


def test_a_capture_changes_nothing_and_a_replay_runs_on_the_captured_memory() -> None:
    with EmulatedGPU() as gpu, recorded_graphs(gpu):
        x, w = torch.arange(4.0, device="cuda"), torch.ones(4, device="cuda")
        state, graph = gpu.state.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # type: ignore[arg-type]
            noise = torch.bernoulli(torch.full_like(x, 0.5))
            w.add_(2.0 * x + noise - noise)
            total = w.sum()
        assert torch.equal(w.cpu(), torch.ones(4))
        assert torch.equal(gpu.state, state)
        assert bool(total.isnan())
        x.fill_(3.0)
        graph.replay()
        assert float(total) == 28.0
        assert not torch.equal(gpu.state, state)
        x = torch.zeros(4, device="cuda")  # which the graph does not see
        graph.replay()
        assert float(total) == 52.0
        with pytest.raises(RuntimeError, match="stream is capturing"), torch.cuda.graph(graph):  # type: ignore[arg-type]
            float(total)


# ---- where it is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_device_without_cuda_refuses_graphs(device: str, tmp_path: Path) -> None:
    keys = SMALL | {"device": device, "cuda-graph": True, "output": str(tmp_path)}
    config = RunConfig.parse(keys)
    for there in (lambda: run_in_process(config), lambda: on_a_client(config)):
        with pytest.raises(ValueError, match=r"cuda-graph needs a CUDA device, .* on cpu"):
            there()
    assert worker.fresh_model(config).graphs is None  # of a server, which takes no local steps


def test_a_model_elsewhere_refuses_graphs() -> None:
    with pytest.raises(ValueError, match="cuda_graph needs a CUDA device, the model is on cpu"):
        FlatModel(smooth(), cuda_graph=True)
    with EmulatedGPU("xpu"), pytest.raises(ValueError, match="the model is on xpu"):
        FlatModel(smooth(), device="xpu", cuda_graph=True)
