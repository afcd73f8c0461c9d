"""Networks with all kinds of arrays, and problems on them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import Border, LocalTraining, Problem, solve
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem


class Net(nn.Module):
    """A convolution, BatchNorm, a frozen scale and a linear layer: all kinds of arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 0.5]), requires_grad=False)
        self.out = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        out: Tensor = self.out(x * self.scale)
        return out


class Tied(nn.Module):
    """Two names of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


def images(n: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(n, 2, 6, 6, dtype=torch.float64), torch.arange(n) % 4


def net_problem(n: int = 6) -> Problem:
    torch.manual_seed(4)
    return Problem(Border(Net().to(torch.float64)), cross_entropy, *images(n))


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


def train(problem: Problem, steps: int = 3, **settings: object) -> Tensor:
    training = LocalTraining(**{"solver": "gd", "lr": 0.1, "steps": steps} | settings)
    model = problem.model
    return solve(problem, model.vector.clone(), Subproblem(), training, stream(1, "t"))[0]
