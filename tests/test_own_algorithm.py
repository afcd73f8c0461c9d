"""An algorithm of a user's own, registered by two entries: what the package concludes for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from laws import START, Row, local
from problems import grid, make_client_app, quadratics, to_record, to_vector
from small_runs import compare
from stacked_runs import EXACT, classified, clients_of, one_by_one, relative, run, smooth, stacked
from torch import Tensor

from clients import CLIENTS, FederatedClient, InProcessGrid, Step
from fl_strategies import (
    STRATEGIES,
    FedAvg,
    FederatedStrategy,
    Next,
    Round,
    Subproblem,
    Upload,
    weighted_mean,
)
from fl_strategies.core.stacks import norm
from fl_strategies.parts import BFloat16, TopK


class OfChanges(FederatedStrategy):
    """theta <- theta + mean (w_i - theta)."""

    algorithm, averages = "own", "changes"

    def aggregate(self, state: None, round: Round, uploads: Sequence[Upload]) -> Next:
        return round.theta + weighted_mean((one.vector, 1.0) for one in uploads), state, {}


class OfModels(FederatedStrategy):
    """theta <- mean w_i."""

    algorithm, averages = "own", "models"

    def aggregate(self, state: None, round: Round, uploads: Sequence[Upload]) -> Next:
        return round.mean((one.vector, 1.0) for one in uploads), state, {}


class Own(FederatedClient):
    """It uploads its model."""

    algorithm = "own"
    start = 1.0

    def step(self, state: None, received: Any, oracle: Any, config: Any) -> Step:
        solved = oracle.solve(received.theta, Subproblem())
        change = self.scaled(solved.w - received.theta)
        return Step(self.start * received.theta + change, solved=solved)

    def scaled(self, change: Tensor) -> Tensor:
        return change


class Changes(Own):
    """It uploads its change."""

    start = 0.0


class Shortened(Own):
    """Its rule is one of a single client: the norm of a stack is that of all clients."""

    def scaled(self, change: Tensor) -> Tensor:
        return change / (1.0 + change.norm())


class Stacked(Own):
    """Its rule holds for a stack, and it says so."""

    stacks = True

    def scaled(self, change: Tensor) -> Tensor:
        return change / (1.0 + norm(change))


class Inherits(Stacked):
    """Another rule than the one that was said to hold for a stack."""

    def scaled(self, change: Tensor) -> Tensor:
        return change / (1.0 + change.norm())


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    for registry in (STRATEGIES, CLIENTS):
        registry.pop("own", None)


def model(
    strategy: type[FederatedStrategy], client: type[FederatedClient], grid: Any, **options: Any
) -> np.ndarray:
    STRATEGIES["own"], CLIENTS["own"] = strategy, client
    made = strategy(local=local(), fraction_evaluate=0.0, **options)
    return to_vector(made.start(grid, to_record(START), 4).arrays)


def of_fedavg(**options: Any) -> np.ndarray:
    made = FedAvg(local=local(), fraction_evaluate=0.0, weights="uniform", **options)
    return to_vector(made.start(grid(quadratics(4)), to_record(START), 4).arrays)


@pytest.mark.parametrize(
    ("strategy", "client"), [(OfChanges, Changes), (OfModels, Own)], ids=["changes", "models"]
)
@pytest.mark.parametrize(
    "part",
    [{}, {"clipping_norm": 0.1}, {"clipping_norm": 1e3}, {"compression": TopK(share=0.5)}],
    ids=["alone", "clipped", "not clipped", "topk"],
)
def test_fedavg_by_models_or_by_changes_is_fedavg_with_any_part(
    strategy: type[FederatedStrategy], client: type[FederatedClient], part: Any
) -> None:
    found = model(strategy, client, grid(quadratics(4)), **part)
    np.testing.assert_allclose(found, of_fedavg(**part), rtol=1e-12)


def test_rounded_downloads_do_not_stop_a_mean_of_models() -> None:
    part = {"download": BFloat16()}
    found = model(OfModels, Own, grid(quadratics(4)), **part)
    np.testing.assert_allclose(found, of_fedavg(**part), rtol=1e-12)


@pytest.mark.parametrize(
    ("client", "at_once"), [(Shortened, False), (Stacked, True), (Inherits, False)]
)
def test_clients_are_stacked_where_their_own_class_says_so(
    client: type[Own], at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    STRATEGIES["own"], CLIENTS["own"] = OfModels, client
    problems = classified(smooth())
    made = clients_of(problems)
    row = Row("own")
    found, alone = (
        run(row, federation, problems, local=local(), fraction_evaluate=0.0).arrays
        for federation in (stacked(made, 5), one_by_one(made, 5))
    )
    assert relative(found.to_numpy_ndarrays(), alone.to_numpy_ndarrays()) <= EXACT
    assert ("does not say `stacks = True`" in caplog.text) is not at_once


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
def test_worker_processes_know_it() -> None:
    STRATEGIES["own"], CLIENTS["own"] = OfModels, Own
    found = model(OfModels, Own, InProcessGrid(make_client_app(quadratics(4)), 4, workers=2))
    np.testing.assert_allclose(found, of_fedavg(), rtol=1e-12)


def test_an_algorithm_of_its_own_name_has_clients_that_know_it() -> None:
    """FedAvg's may be any: they would train FedAvg."""

    class Other(FedAvg):
        algorithm = "own"

    class OfTheServer(FedAvg):
        algorithm, runs = "own", "fedavg"

    assert not Other.unnamed
    assert OfTheServer.unnamed == FedAvg.unnamed != ""


MODULE = """
from fl_strategies import STRATEGIES, FedAvg

class Own(FedAvg):
    algorithm = "own"

STRATEGIES["own"] = Own
"""


@pytest.mark.slow
def test_compare_imports_it_in_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    fedavg, own = compare(tmp_path / "out", "--import own_module --algorithms fedavg,own --jobs 2")
    assert own["model_sha256"] == fedavg["model_sha256"]
