"""An algorithm of a user's own, registered by two entries: what the package concludes for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    Checkpoints,
    FedAvg,
    FederatedStrategy,
    Next,
    Round,
    Subproblem,
    Upload,
    weighted_mean,
)
from fl_strategies.core.stacks import norm
from fl_strategies.parts import BFloat16, Gaussian, Median, TopK


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


@pytest.mark.parametrize(
    "part",
    [{"combine": Median()}, {"privacy": Gaussian(clip=1.0)}],
    ids=str,
)
def test_a_part_that_acts_in_the_mean_is_not_passed_over(part: dict[str, Any]) -> None:
    class Aside(OfModels):
        averages = "models"

        def aggregate(self, state: None, round: Round, uploads: Sequence[Upload]) -> Next:
            return weighted_mean((one.vector, 1.0) for one in uploads), state, {}

    CLIENTS["own"] = Own
    STRATEGIES["own"] = Aside
    with pytest.raises(ValueError, match=r"^Aside.aggregate must average by round.mean, in which"):
        Aside(local=local(), fraction_evaluate=0.0, **part).start(
            grid(quadratics(3)), to_record(START), 1
        )


class Holds(NamedTuple):
    kept: Any


class Keeper(FederatedStrategy):
    """FedAvg that keeps what it is given, or the clients' uploads."""

    algorithm, averages, runs = "own", "", "fedavg"
    begins_with: Any = None

    def first_state(self, theta: Any) -> Holds:
        return Holds(self.begins_with)

    def aggregate(self, state: Holds, round: Round, uploads: Sequence[Upload]) -> Next:
        theta = round.mean((one.vector, 1.0) for one in uploads)
        return theta, state if state.kept else Holds({u.client: u.vector for u in uploads}), {}


def kept_by(value: Any, folder: Path) -> tuple[Any, Any]:
    """Return what a run keeps, and what the run that continues from its checkpoint does."""
    kept = []
    for resume in (False, True):
        STRATEGIES["own"] = type("Own", (Keeper,), {"begins_with": value, "algorithm": "own"})
        one: Any = STRATEGIES["own"](
            local=local(), fraction_evaluate=0.0, checkpoints=Checkpoints(folder)
        )
        one.start(grid(quadratics(2)), to_record(START), 1, resume=resume)
        kept.append(one.state.kept)
    return kept[0], kept[1]


@pytest.mark.parametrize(
    "value", [{"a": (1, 2.5), 3: ["x", None, True]}, (1.0, (2,)), [{}, 0]], ids=str
)
def test_a_checkpoint_gives_back_what_a_state_holds(value: Any, tmp_path: Path) -> None:
    before, after = kept_by(value, tmp_path)
    assert before == after == value
    assert repr(before) == repr(after)


def test_uploads_may_be_kept_as_they_are(tmp_path: Path) -> None:
    before, after = kept_by({}, tmp_path)
    assert before.keys() == after.keys() == {0, 1}
    for client in before:
        np.testing.assert_array_equal(before[client], after[client])


@pytest.mark.parametrize(
    "value", [{(0, 1): 2.0}, defaultdict(float, a=1.0), {1.5, 2.5}, [np.float32(1.0)]], ids=str
)
def test_what_a_checkpoint_would_not_give_back_is_refused_before_the_first_round(
    value: Any, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=r"^Own.first_state must return a state of numbers, texts"):
        kept_by(value, tmp_path)
