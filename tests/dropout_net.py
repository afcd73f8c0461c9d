"""A network with batch normalisation and dropout, problems and federations of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import AnyAlgorithmClient, Border, ContextStore, Problem, client_app, client_id
from clients.node.in_process import InProcessGrid
from fl_strategies import FederatedStrategy

MU, TAU = 1.7, 0.3


class Net(nn.Module):
    """A convolution with BatchNorm, dropout and two linear layers, the last one made first."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.4)
        self.middle = nn.Linear(16, 6)
        self.passes = 0

    def seen(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return torch.tanh(self.middle(self.drop(x)))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        out: Tensor = self.out(self.seen(x))
        return out


def net(seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = Net().double()
        module.norm.running_mean.normal_()
        module.norm.running_var.uniform_(0.5, 2.0)
    return module


def examples(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.normal(seed, 1 + seed, (n, 1, 4, 4))), torch.tensor(
        rng.integers(0, 3, n)
    )


def net_problem(n: int = 7) -> Problem:
    return Problem(Border(net()), cross_entropy, *examples(n))


def arrays(module: nn.Module) -> list[np.ndarray]:
    return [tensor.detach().numpy().copy() for tensor in module.state_dict().values()]


def nets(
    of: type[FederatedStrategy],
    rounds: int,
    module: Callable[[], nn.Module] = net,
    sizes: Sequence[int] = (9, 5, 6),
    **hyperparameters: Any,
) -> list[np.ndarray]:
    """Return the model after ``rounds`` of mini-batches, two of three clients in each."""
    problems = [
        Problem(Border(module()), cross_entropy, *examples(n, i)) for i, n in enumerate(sizes)
    ]

    def client_fn(context: Any) -> AnyAlgorithmClient:
        i = client_id(context)
        return AnyAlgorithmClient(problems[i], client_id=i, store=ContextStore(context))

    one = of(
        fraction_train=0.7,
        fraction_evaluate=0.0,
        local={"batch-size": 4, "epochs": 2, "lr": 0.05, **hyperparameters.pop("local", {})},
        **hyperparameters,
    )
    initial = ArrayRecord({n: Array(t.numpy()) for n, t in module().state_dict().items()})
    federation = InProcessGrid(client_app(client_fn), len(sizes))
    return [array.numpy() for array in one.start(federation, initial, rounds).arrays.values()]


def same(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))
