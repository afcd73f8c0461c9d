"""Runs with checkpoints, and what they come to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from laws import START, TABLE, Row, local
from problems import grid, quadratics, to_record, to_vector

from clients import DirectoryStore, client_id
from clients.node.in_process import Fault, InProcessGrid
from fl_strategies import Checkpoints, FederatedStrategy, RoundInfo

CLIENTS = 5
ROUNDS = 60

OPTIONS: dict[str, dict[str, Any]] = {
    "fedpd": {"p": 0.3},
    "fedpd-vr": {"p": 0.3},
    "fedbcd-async": {"servers": 5, "first": 2, "staleness": 3},
    "fedbcd-i-async": {"servers": 5, "first": 2, "staleness": 3},
    "fedadmm": {"eta": "fraction"},
}
"""Settings with more to remember than the usual ones have."""


def federation(folder: Path, fault: Fault | None = None) -> InProcessGrid:
    def store(context: Any) -> DirectoryStore:
        return DirectoryStore(folder / "states", client_id(context))

    return grid(quadratics(CLIENTS), store=store, fault=fault)


def strategy(row: Row, folder: Path, **options: Any) -> FederatedStrategy:
    checkpoints = {"every": 2} | options.pop("checkpoints", {})
    return row.strategy(
        **{"local": local(), "fraction_train": 0.6, "seed": 3}
        | OPTIONS.get(row.name, {})
        | {"checkpoints": Checkpoints(folder / "checkpoints", **checkpoints)}
        | options
    )


def loss(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    w = to_vector(arrays)
    return MetricRecord({"test-loss": float(np.mean([q.value(w) for q in quadratics(CLIENTS)]))})


def run(one: FederatedStrategy, folder: Path, rounds: int = ROUNDS, **options: Any) -> Result:
    on, initial = federation(folder, options.pop("fault", None)), to_record(START)
    return one.start(on, initial, rounds, **{"evaluate_fn": loss, "resume": True} | options)


def outcome(result: Result) -> dict[str, Any]:
    """All that a run comes to, but for the time that it took."""
    phases = {
        "train": result.train_metrics_clientapp,
        "evaluate": result.evaluate_metrics_clientapp,
        "server": result.evaluate_metrics_serverapp,
    }
    rows = {
        name: {
            number: {k: v for k, v in record.items() if k != "seconds"}
            for number, record in phase.items()
        }
        for name, phase in phases.items()
    }
    return {"model": to_vector(result.arrays).tolist(), **rows}


FEDADMM = next(row for row in TABLE if row.name == "fedadmm")


def stop_at(number: int) -> Callable[[RoundInfo], None]:
    def callback(info: RoundInfo) -> None:
        if info.server_round == number:
            raise KeyboardInterrupt

    return callback


def interrupted(one: FederatedStrategy, folder: Path, at: int, **options: Any) -> None:
    one.callbacks = (*one.callbacks, stop_at(at))
    with pytest.raises(KeyboardInterrupt):
        run(one, folder, **options)
