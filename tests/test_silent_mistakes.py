"""Mistakes that would train without a word: each is refused, told, or set right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import (
    DataLoader,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from clients import FlatModel, Problem, StreamedProblem
from fl_strategies.core.log import log_once

X = torch.linspace(-1, 1, 35).reshape(7, 5)
Y = torch.arange(7) % 3


def model() -> FlatModel:
    return FlatModel(nn.Linear(5, 3))


def test_numbers_of_another_shape_than_the_outputs_are_refused() -> None:
    regression = FlatModel(nn.Linear(5, 1))
    problem = Problem(regression, mse_loss, X, X[:, 0])
    with pytest.raises(ValueError, match=r"\[7\], and .* \[7, 1\]: targets.reshape\(-1, 1\)"):
        problem.evaluate()
    assert math.isfinite(Problem(regression, mse_loss, X, X[:, :1]).evaluate().loss)


def test_parameters_of_a_loss_are_not_left_untrained() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(outputs * self.scale, targets)

    with pytest.raises(ValueError, match=r"no client would train, \['scale'\]"):
        Problem(model(), Scaled(), X, Y)
    Problem(model(), Scaled().requires_grad_(False), X, Y)


def test_samples_of_a_loader_are_those_of_its_sampler() -> None:
    some = SubsetRandomSampler(range(3))
    loader = DataLoader(TensorDataset(X, Y), batch_size=2, sampler=some)
    assert len(StreamedProblem(model(), cross_entropy, loader)) == 3


class Noisy(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.randn(5), y


@pytest.mark.parametrize(
    ("data", "drawn"),
    [
        (lambda: DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True), ""),
        (lambda: DataLoader(TensorDataset(X, Y), batch_size=2, drop_last=True), "drop_last"),
        (
            lambda: DataLoader(TensorDataset(X, Y), sampler=WeightedRandomSampler([1.0] * 7, 9)),
            "the WeightedRandomSampler",
        ),
        (lambda: Noisy(X, Y), "the Dataset"),
    ],
)
def test_draws_that_are_the_same_in_all_rounds_are_told(
    data: Any, drawn: str, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    Problem(model(), cross_entropy, data())
    said = [r.getMessage() for r in caplog.records if "draws" in r.getMessage()]
    assert [f"what {drawn} draws is the same" in text for text in said] == [True] * bool(drawn)


def test_a_large_batch_that_has_no_row_per_target_stays_whole() -> None:
    """A graph of 1,200 nodes: features, edges, classes."""

    class Graph(nn.Linear):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return super().forward(x.index_add(0, edges[0], x[edges[1]]))

    n = 1200
    graph = torch.randn(n, 5), torch.randint(0, n, (2, 3000)), torch.arange(n) % 3
    loader = DataLoader([graph], batch_size=1, collate_fn=lambda items: items[0])
    problem = StreamedProblem(FlatModel(Graph(5, 3)), cross_entropy, loader, samples=n)
    ((inputs, targets),) = problem.chunks()
    loss, _ = problem.gradient(inputs, targets)
    assert loss == cross_entropy(problem.model.module(*inputs), targets)
