"""FedBCD's strategy as its tests set it, and the paper's steps on a quadratic in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from laws import RATE, START, local
from problems import (
    Quadratic,
)

from clients.node.in_process import InProcessGrid
from clients.node.state import ContextStore, Owner, peek
from fl_strategies import FedBCD


def fedbcd_(**knobs: Any) -> FedBCD:
    return FedBCD(**{"box": None, "fraction_evaluate": 0.0, "local": local(), **knobs})


def devices(federation: InProcessGrid, acked: dict[int, int]) -> dict[int, dict[str, Any]]:
    """Return, by client, what it keeps as of the reply used last; newcomers have nothing."""
    found = {}
    for client, context in enumerate(federation.contexts.values()):
        store = ContextStore(context)
        about = context.state.config_records.get(store.prefix)
        if about is not None:
            owner = Owner(*(str(about[name]) for name in ("algorithm", "model", "run")))
            _, fields = peek(store, owner, acked.get(client, -1))
            if fields is not None:
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
