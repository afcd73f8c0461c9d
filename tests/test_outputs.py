"""What modules return: a record with logits, several outputs, outputs without an accuracy."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import FlatModel, LocalTraining, Problem, solve
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem


@pytest.mark.parametrize(
    ("outputs", "targets", "accuracy"),
    [
        ([[0.0, 1.0], [3.0, 1.0]], [1, 1], 0.5),
        ([[[0.0, 2.0], [1.0, 1.0]], [[5.0, 2.0], [1.0, 3.0]]], [[1, 0], [1, 1]], 0.75),  # sequences
        ([[2.0], [1.0]], [1, 0], math.nan),  # one logit for two classes
        ([[2.0], [1.0]], [[1], [0]], math.nan),
        ([2.0, 1.0], [1, 0], math.nan),
        ([[2.0, 1.0, 3.0], [1.0, 1.0, 2.0]], [[1, 0, 1], [0, 0, 1]], math.nan),  # several labels
    ],
)
def test_accuracy_is_a_share_of_the_targets_or_there_is_none(
    outputs: Any, targets: Any, accuracy: float
) -> None:
    module = nn.Identity()
    module.unused = nn.Parameter(torch.zeros(1))
    given = torch.tensor(outputs), torch.tensor(targets)
    problem = Problem(FlatModel(module), lambda o, y: o.sum(), *given)
    assert problem.evaluate().accuracy == pytest.approx(accuracy, nan_ok=True)


class Twice(nn.Module):
    """Two outputs in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.line(x), self.line(2 * x)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_loss_may_be_of_several_outputs_which_have_no_accuracy(
    autocast: torch.dtype | None,
) -> None:
    x, y = torch.ones(5, 3), torch.arange(5) % 2
    problem = Problem(
        FlatModel(Twice()),
        lambda o, y: cross_entropy(o[0].float(), y) + o[1].float().square().mean(),
        x, y, autocast=autocast,
    )  # fmt: skip
    before, gd = problem.evaluate(), LocalTraining(solver="gd")
    found = solve(problem, problem.model.vector.clone(), Subproblem(), gd, stream(1, "solve"))
    assert math.isnan(before.accuracy)
    assert math.isnan(float(found.accuracy))
    problem.model.vector.copy_(found.w)
    assert problem.evaluate().loss < before.loss


class Scaled(nn.Module):
    """Logits in a record, times a parameter that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.line = nn.Parameter(torch.tensor(2.0)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=self.scale * self.line(x))


def test_a_parameter_may_be_a_number_and_outputs_a_record_with_logits() -> None:
    x, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), torch.arange(5) % 2
    problem = Problem(FlatModel(Scaled()), cross_entropy, x, y)
    model = problem.model
    loss, outputs = problem.gradient(x, y)
    assert loss == pytest.approx(float(cross_entropy(outputs, y)))
    slopes = torch.autograd.grad(cross_entropy(model.module(x).logits, y), model.shared)
    for ours, theirs in zip(model.views(model.gradient), slopes, strict=True):
        torch.testing.assert_close(ours, theirs)
