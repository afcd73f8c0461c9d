"""Federations whose clients are trained as stacks, beside the same trained one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Error, Message, MessageType
from flwr.client import NumPyClient
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import AnyAlgorithmClient, ContextStore, FlatModel, LocalTraining, Problem, client_app
from clients.cohort import fit_cohort
from clients.node.bridge import _reply, _request, encoded
from clients.node.in_process import InProcessGrid
from fl_strategies.core.reasons import of_exception

Made = Callable[[Context], NumPyClient]

CLASSES = 3


class Stacked(InProcessGrid):
    """The clients that ``made(context)`` returns, each round's as one call of ``fit_cohort``.

    ``options`` are that function's.
    """

    def __init__(self, made: Made, clients: int, **options: Any) -> None:
        super().__init__(client_app(made), clients)
        self.made, self.options = made, {"cohort": 1000, **options}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        asked = [*messages]
        training = [m for m in asked if m.metadata.message_type == MessageType.TRAIN]
        ids = [*super().push_messages(m for m in asked if m not in training)]
        if not training:
            return ids
        clients = [self.made(self.contexts[m.metadata.dst_node_id]) for m in training]
        requests = [_request(m, c) for m, c in zip(training, clients, strict=True)]
        names, arrays, _ = requests[0]
        configs = [config for _, _, config in requests]
        outcomes = fit_cohort(clients, arrays, configs, **self.options)
        for message, outcome in zip(training, outcomes, strict=True):
            if isinstance(outcome, Exception):
                reply = Message(Error(2, of_exception(outcome)), reply_to=message)
            else:
                uploaded, samples, metrics = outcome
                pairs = zip(names, uploaded, strict=True)
                record = ArrayRecord({name: encoded(array) for name, array in pairs})
                reply = _reply(message, samples, metrics, record)
            ids.append(str(next(self._message_ids)))
            self._replies[ids[-1]] = reply
        return ids


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
