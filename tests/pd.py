"""FedPD's strategy as its tests set it, and its clients' states."""

from __future__ import annotations

from typing import Any

import numpy as np
from laws import local
from problems import kept

from clients.node.in_process import InProcessGrid
from fl_strategies import FedPD, fedpd

SGD = local(solver="sgd", epochs=2, **{"batch-size": 3})
VR = {"oracle": "II", "gamma": 0.3, "inner_steps": 3, "inner_batch": 2, "full_every": 3}


def strategy(**hyperparameters: Any) -> FedPD:
    settings = {} if hyperparameters.get("oracle") == "II" else SGD
    return FedPD(**{"eta": 0.5, "fraction_evaluate": 0.0, "local": settings, **hyperparameters})


def states(federation: InProcessGrid, acked: dict[int, int]) -> list[fedpd.State]:
    """Return the state of each client that the server counts on."""
    return [fedpd.State(f["x"], f["lam"], f["g"]) for f in kept(federation, acked)]


def same(ours: list[fedpd.State], theirs: list[fedpd.State]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for value, expected in zip(mine, other, strict=True):
            np.testing.assert_array_equal(value, np.asarray(expected))
