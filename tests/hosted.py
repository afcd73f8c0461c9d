"""Federations whose nodes host several clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict
from laws import local
from problems import Quadratic, make_client_app, quadratics

from clients import ContextStore
from clients.node.in_process import Fault, InProcessGrid
from clients.node.state import Owner, peek
from fl_strategies import FedADMM

CLIENTS = 6
SHAPES: dict[str, tuple[list[Any], bool]] = {
    "nodes of one": ([None] * CLIENTS, False),
    "2 hosts": ([[0, 1, 2], [3, 4, 5]], False),
    "2 hosts, crossed and reversed": ([[4, 2, 0], [5, 3, 1]], False),
    "1 host": ([[*range(CLIENTS)]], False),
    "a host and nodes of one": ([None, [1, 2, 4, 5], None], False),
    "3 hosts that share": ([CLIENTS] * 3, True),
    "1 host that shares": ([CLIENTS], True),
    "2 hosts, states in memory": ([[0, 1, 2], [3, 4, 5]], True),
}
"""What each node hosts; whether the engine keeps each client's context."""


def federation(
    shape: str = "2 hosts",
    *,
    fault: Fault | None = None,
    problems: Sequence[Quadratic] | None = None,
    **options: Any,
) -> InProcessGrid:
    """Return six clients spread over nodes as ``shape`` says."""
    hosts, in_memory = SHAPES[shape]
    hosted = {client for one in hosts if isinstance(one, list) for client in one}
    alone = iter([client for client in range(CLIENTS) if client not in hosted])
    places = [next(alone) if one is None else number for number, one in enumerate(hosts)]
    app = make_client_app(
        problems or quadratics(CLIENTS),
        hosts=lambda c: hosts[int(c.node_config["node"])],
        **options,
    )
    nodes = (
        {"num_clients": CLIENTS, "hosts": len(hosts)} if in_memory else {"num_clients": len(hosts)}
    )
    grid = InProcessGrid(app, **nodes, fault=fault)
    of = len(hosts) if "share" in shape else CLIENTS
    for number, context in enumerate(grid.contexts.values()):
        here = {"node": number, "partition-id": places[number], "num-partitions": of}
        context.node_config |= here
    return grid


def shared(shape: str) -> dict[str, int]:
    """Return the option that a strategy needs for ``shape``."""
    return {"shared_population": CLIENTS} if "share" in shape else {}


def admm(shape: str = "2 hosts", **hyperparameters: Any) -> FedADMM:
    usual: dict[str, Any] = {"rho": 1.5, "eta": "fraction", "fraction_train": 0.5}
    usual |= {"fraction_evaluate": 0.0, "local": local(lr=0.4), "node_wait": 0.01}
    return FedADMM(**{**usual, **shared(shape), **hyperparameters})


def state_of(grid: InProcessGrid, client: int, acked: int) -> dict[str, np.ndarray]:
    """Return the fields that a hosted client keeps in its host's ``context.state``."""
    for context in grid.contexts.values():
        prefix = f"client-{client}/"
        own = RecordDict(
            {k.removeprefix(prefix): v for k, v in context.state.items() if k.startswith(prefix)}
        )
        if own:
            store = ContextStore(Context(1, 1, {}, own, {}))
            about = own.config_records[store.prefix]
            owner = Owner(*(str(about[name]) for name in ("algorithm", "model", "run")))
            fields = peek(store, owner, acked)[1]
            assert fields is not None
            return dict(fields)
    raise LookupError(f"no state of client {client}")
