"""A client that trains by itself, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from problems import grid, quadratics

from clients import CLIENTS, ContextStore, LocalTraining

START = np.array([2.0, -1.0, 0.5, 3.0, -4.0])
CONFIG = {"seed": 0, "server-round": 1, "acked-round": -1}


def refused(make: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make()
    return str(caught.value)


TWO = {"gamma": 2.0, "inner-steps": 3, "inner-batch": 2, "full-every": 5}
PD = {"eta": 1.0, "x0-rule": "paper", "first-algorithm-round": 0, "algorithm-rounds": 1}


def fit(algorithm: str, config: dict[str, Any], **options: Any) -> Any:
    """One request to a client of the algorithm, past any strategy."""
    (q,) = quadratics(1)
    store = ContextStore(next(iter(grid([q]).contexts.values())))
    options = {"training": LocalTraining(solver="gd"), **options}
    client = CLIENTS[algorithm](q.problem(), client_id=0, store=store, **options)
    start = [START[:4].reshape(2, 2), START[4:]]
    return client.fit(start, {**CONFIG, **config})
