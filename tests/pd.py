"""FedPD's and FedPDVR's strategies as their tests set them, and their clients' states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from laws import local
from problems import kept

from clients.node.in_process import InProcessGrid
from fl_strategies import STRATEGIES, fedpd_vr

SGD = local(solver="sgd", epochs=2, **{"batch-size": 3})
VR = {"gamma": 0.3, "inner_steps": 3, "inner_batch": 2, "full_every": 3}
SETTINGS: dict[str, dict[str, Any]] = {"fedpd": {"local": SGD}, "fedpd-vr": VR}

both = pytest.mark.parametrize("name", SETTINGS)


def strategy(name: str = "fedpd", **hyperparameters: Any) -> Any:
    settings = {"eta": 0.5, "fraction_evaluate": 0.0, **SETTINGS[name]}
    return STRATEGIES[name](**settings | hyperparameters)


def states(federation: InProcessGrid, acked: dict[int, int]) -> list[fedpd_vr.State]:
    """Return the state of each client that the server counts on; FedPD's has no g."""
    none = np.zeros(0)
    return [fedpd_vr.State(f["x"], f["lam"], f.get("g", none)) for f in kept(federation, acked)]


def same(ours: list[fedpd_vr.State], theirs: list[fedpd_vr.State]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for value, expected in zip(mine, other, strict=True):
            np.testing.assert_array_equal(value, np.asarray(expected))
