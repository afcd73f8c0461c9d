"""Federations whose clients are trained as stacks, beside the same trained one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context
from flwr.client import NumPyClient
from flwr.serverapp.strategy import Result
from laws import TABLE, Row
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    Border,
    ContextStore,
    LocalTraining,
    Problem,
    client_app,
)
from clients.node.in_process import InProcessGrid
from fl_strategies.core.log import log_once

Made = Callable[[Context], NumPyClient]

CLASSES = 3


def stacked(made: Made, clients: int, stack: Any = 1000) -> InProcessGrid:
    """Return the federation of one node, which trains the clients ``made(context)`` at once."""
    app = client_app(made, hosts=[*range(clients)], stack=stack)
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
    model, total = Border(module), sum(sizes)
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


ROWS = {row.name: row for row in TABLE}
EXACT = 1e-12
PASSING = {"seconds", "bytes-down", "bytes-up", "bytes-saved"}
"""Metrics of a round that are not its clients'."""
SINGLE = 2e-5
"""In float32: 20 steps, each with roundings of 1.2e-7 over sums of up to 16 samples."""


@pytest.fixture(autouse=True)
def nothing_was_said() -> Iterator[None]:
    log_once.cache_clear()
    yield
    log_once.cache_clear()


def run(row: Row, federation: InProcessGrid, problems: Sequence[Problem], **options: Any) -> Result:
    """Return what two rounds come to."""
    model = problems[0].model
    pairs = zip(model.names, start(problems), strict=True)
    arrays = ArrayRecord({name: Array(array) for name, array in pairs})
    strategy = row.strategy(seed=3, **model.layout_options, **options)
    return strategy.start(federation, arrays, 2)


def start(problems: Sequence[Problem]) -> list[np.ndarray]:
    """Return the first arrays, the same whatever the model has been used for."""
    rng, layout = np.random.default_rng(1), problems[0].model.layout
    made = {
        name: np.asarray(rng.normal(0.0, 0.5, shape), layout.dtypes[name])
        for name, shape in layout.shapes.items()
    }
    made |= {copy: made[first] for copy, first in layout.copies.items()}
    return (
        [np.asarray(abs(array)) for array in made.values()] if layout.buffers else [*made.values()]
    )


def assert_alike(
    row: Row,
    problems: Sequence[Problem],
    *,
    within: float = EXACT,
    training: Mapping[str, Any] | None = None,
    stack: int = 1000,
    **options: Any,
) -> Result:
    """Models, metrics and states of both are the same, and no client was trained alone.

    Returns what the stack came to.
    """
    made = clients_of(problems, **(training or {}))
    alone = one_by_one(made, len(problems))
    at_once = stacked(made, len(problems), stack)
    expected = run(row, alone, problems, **options)
    with mock.patch("clients.stacking.fit._alone", side_effect=AssertionError("trained alone")):
        found = run(row, at_once, problems, **options)
    assert relative(*(r.arrays.to_numpy_ndarrays() for r in (found, expected))) < within
    for turn, metrics in expected.train_metrics_clientapp.items():
        mine = found.train_metrics_clientapp[turn]
        for name in metrics.keys() - PASSING:
            assert mine[name] == pytest.approx(metrics[name], rel=10 * within, nan_ok=True), name
    for number, context in enumerate(alone.contexts.values()):
        if number not in at_once.clients:  # it was never asked
            assert not context.state
            continue
        kept, records = at_once.clients[number].state.array_records, context.state.array_records
        assert kept.keys() == records.keys()
        for key, record in records.items():
            assert kept[key].keys() == record.keys()
            for name in record.keys() - {"nonce"}:
                mine, theirs = kept[key][name].numpy(), record[name].numpy()
                assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
                np.testing.assert_allclose(mine, theirs, rtol=1e3 * within, atol=10 * within)
    return found
