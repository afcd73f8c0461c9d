"""FedBCD's strategy as its tests set it, and the paper's steps on a quadratic in NumPy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from laws import RATE, START, quiet
from problems import CLIENT_OF, Quadratic, fields_of

from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, FedBCD, FedBCDAsync, FedBCDI, FedBCDIAsync, RoundInfo
from fl_strategies.bcd.clouds import CloudStrategy

CLOUD_RULES = [name for name, kind in STRATEGIES.items() if issubclass(kind, CloudStrategy)]

fedbcd_ = partial(quiet, FedBCD, box=None)
fedbcd_i_ = partial(quiet, FedBCDI, box=None)
async_ = partial(quiet, FedBCDAsync, box=None)
i_async_ = partial(quiet, FedBCDIAsync, box=None)

both = pytest.mark.parametrize("make", [async_, i_async_], ids=["fedbcd", "fedbcd-i"])
"""The async-cloud strategies."""


def devices(federation: InProcessGrid, acked: dict[int, int]) -> dict[int, dict[str, Any]]:
    """Return, by client, what it keeps as of the reply used last; newcomers have nothing."""
    found = {}
    for node, context in federation.contexts.items():
        client = CLIENT_OF[node]
        if fields := fields_of(context, acked.get(client, -1)):
            found[client] = dict(fields)
    return found


def sum_of_last_models(federation: InProcessGrid, acked: dict[int, int], clients: int) -> Any:
    """Return sum_i x_i over all devices, with x_i = START for those that never took part."""
    kept = devices(federation, acked)
    return sum(kept[i]["x"] if i in kept else START for i in range(clients))


def aspg(
    q: Quadratic, x: Any, previous: Any, steps: int, *, zeta: float, **sub: Any
) -> tuple[Any, Any]:
    """ASPG on a quadratic in NumPy, step by step as the paper writes it; ``sub``: gamma, z, box."""
    gamma, z, box = sub.get("gamma", 0.0), sub.get("z", 0.0), sub.get("box", np.inf)
    for _ in range(steps):
        e = x + zeta * (x - previous)
        step = q.gradient(e) + gamma * (e - z)
        x, previous = np.maximum(-box, np.minimum(box, e - RATE * step)), x
    return x, previous


def mixed_in(one: FedBCDAsync | FedBCDIAsync, info: RoundInfo) -> list[int]:
    """The cloud servers that mixed in the round."""
    return [n for n, last in enumerate(one.state.mixed) if last == info.server_round]
