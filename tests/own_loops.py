"""Clients that train the problems of ``problems`` by loops of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from limits import RATE, STEPS
from problems import Linear, Quadratic, half_mean_square
from torch import nn
from torch.optim import SGD

from clients import AnyAlgorithmClient, ContextStore, OwnTraining, client_app, client_id

Loop = Callable[[nn.Module, Any, Quadratic], Any]


def descend(
    module: nn.Module, config: Any, q: Quadratic, *, steps: int = STEPS, momentum: float = 0.0
) -> None:
    """Take full-batch steps, as ``laws.local`` does."""
    x, y = torch.tensor(q.X), torch.tensor(q.y)
    optimizer = SGD(module.parameters(), RATE, momentum=momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        half_mean_square(module(x), y).backward()
        optimizer.step()


def tested(module: nn.Module, config: Any, q: Quadratic) -> dict[str, float]:
    with torch.no_grad():
        loss = half_mean_square(module(torch.tensor(q.X)), torch.tensor(q.y))
    return {"loss": float(loss), "doubled": 2.0 * float(loss)}


def own_app(
    problems: Sequence[Quadratic],
    loop: Loop = descend,
    *,
    test: Loop = tested,
    module: Callable[[], Any] = Linear,
    client: Callable[..., Any] = AnyAlgorithmClient,
    store: Callable[[Context], Any] = ContextStore,
    hosts: Any = None,
    max_steps: int = 1_000,
    **options: Any,
) -> ClientApp:
    """Return a ClientApp of clients that train by ``loop``."""

    def client_fn(context: Context) -> Any:
        q = problems[client_id(context)]
        train, evaluate = functools.partial(loop, q=q), functools.partial(test, q=q)
        problem = OwnTraining(module(), train, q.n, evaluate=evaluate, **options)
        of = {"client_id": client_id(context), "store": store(context), "max_steps": max_steps}
        return client(problem, **of)

    return client_app(client_fn, hosts=hosts)
