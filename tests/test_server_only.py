"""An algorithm that changes the server alone: here FedAvgM, of which clients know nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hosted import federation
from laws import START, local
from problems import grid, quadratics, to_record, to_vector

from clients.node.in_process import InProcessGrid
from fl_strategies import Checkpoints, FedAvg, FederatedStrategy, Next, Round, Upload
from fl_strategies.core.vectors import Vector


class State(NamedTuple):
    """What the server keeps: v [d]."""

    v: Vector


class FedAvgM(FedAvg):
    """v <- 0.9 v + (mean - theta);  theta <- theta + v  (Hsu, Qi, Brown, 2019)."""

    algorithm, runs, averages, folds = "fedavgm", "fedavg", "", True

    def first_state(self, theta: Vector) -> State:
        return State(np.zeros_like(theta))

    def aggregate(self, state: State, round: Round, uploads: Sequence[Upload]) -> Next:
        mean, _, info = super().aggregate(None, round, uploads)
        v = 0.9 * state.v + (mean - round.theta)
        return round.theta + v, State(v), info


def model(
    kind: type[FederatedStrategy],
    on: InProcessGrid,
    rounds: int,
    theta: np.ndarray = START,
    checkpoints: Checkpoints | None = None,
    *,
    resume: bool = False,
    fold: str = "auto",
) -> np.ndarray:
    strategy = kind(
        local=local(),
        fraction_evaluate=0.0,
        checkpoints=checkpoints,
        fold=fold,
    )
    return to_vector(strategy.start(on, to_record(theta), rounds, resume=resume).arrays)


def test_clients_that_know_nothing_of_it_run_it() -> None:
    problems, theta, v = quadratics(3), START, 0.0 * START
    for rounds in (1, 2, 3, 4):
        v = 0.9 * v + (model(FedAvg, grid(problems), 1, theta) - theta)
        theta = theta + v
        found = model(FedAvgM, grid(problems), rounds)
        np.testing.assert_allclose(found, theta, rtol=1e-12)


def test_its_state_is_checkpointed_and_hosts_fold_its_uploads(tmp_path: Path) -> None:
    whole = model(FedAvgM, federation(), 4)
    for rounds in (2, 4):
        again = Checkpoints(tmp_path)
        found = model(FedAvgM, federation(), rounds, checkpoints=again, resume=True)
    np.testing.assert_array_equal(found, whole)
    folded = model(FedAvgM, federation(), 4, fold="on")
    np.testing.assert_allclose(folded, whole, rtol=1e-12)
