"""Federations whose clients are trained as stacks, beside the same trained one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.client import NumPyClient
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import AnyAlgorithmClient, ContextStore, FlatModel, LocalTraining, Problem, client_app
from clients.node.in_process import InProcessGrid

Made = Callable[[Context], NumPyClient]

CLASSES = 3


def stacked(made: Made, clients: int, cohort: Any = 1000) -> InProcessGrid:
    """Return the federation of one node, which trains the clients ``made(context)`` at once."""
    app = client_app(made, hosts=[*range(clients)], cohort=cohort)
    grid = InProcessGrid(app, clients, hosts=1)
    for context in grid.contexts.values():
        context.node_config["num-partitions"] = clients
    return grid


def clients_of(problems: Sequence[Problem], **training: Any) -> Made:
    """Return what makes the client of each problem, full-batch steps of 0.1 by default."""
    settings = LocalTraining(**{"solver": "gd", "lr": 0.1, **training})

    def made(context: Context) -> NumPyClient:
        number = int(context.node_config["partition-id"])
        mine = problems[number]
        store = ContextStore(context)
        return AnyAlgorithmClient(mine, client_id=number, test=mine, store=store, training=settings)

    return made


def one_by_one(made: Made, clients: int) -> InProcessGrid:
    """Return the federation whose clients ``made(context)`` returns, each answering by itself."""
    return InProcessGrid(client_app(made), clients)


def smooth(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a classifier of [n, 4] with a hidden layer that is smooth everywhere."""
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(dtype)
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(place)
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return module


def classified(
    module: nn.Module,
    sizes: Sequence[int] = (7, 12, 3, 16, 1),
    shape: Sequence[int] = (4,),
    *,
    shared: bool = True,
    inputs: Tensor | None = None,
    **options: Any,
) -> list[Problem]:
    """Return problems of clients with so many samples [*shape] each, on one model.

    They share tensors, or have their own; ``options`` are the problems'.
    """
    model, total = FlatModel(module), sum(sizes)
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(total, *shape))) if inputs is None else inputs[:total]
    y = torch.from_numpy(rng.integers(CLASSES, size=total))
    mixed = torch.from_numpy(rng.permutation(total)).split([*sizes])
    loss = options.pop("loss", cross_entropy)
    if shared:
        return [Problem(model, loss, x, y, rows=rows, **options) for rows in mixed]
    return [Problem(model, loss, x[rows], y[rows], **options) for rows in mixed]


def relative(found: Any, expected: Any) -> float:
    """Return the distance of two vectors, or lists of arrays, in the length of the second."""
    found, expected = (
        np.concatenate([np.ravel(np.asarray(array, np.float64)) for array in arrays])
        for arrays in (found, expected)
    )
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
