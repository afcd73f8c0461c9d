"""Clients that cannot be stacked are trained one by one, and one that fails fails alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from laws import Row, local
from stacked_runs import (
    EXACT,
    ROWS,
    assert_alike,
    classified,
    clients_of,
    one_by_one,
    relative,
    run,
    smooth,
    stacked,
    start,
)
from stacked_runs import nothing_was_said as nothing_was_said
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    ContextStore,
    FedAvgClient,
    FederatedClient,
    FlatModel,
    Problem,
)
from clients.stacking.fit import fit_all
from clients.stacking.obstacles import obstacle

# ---- what is trained one by one -----------------------------------------------------------------


def of_both(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is no mean over samples."""
    return cross_entropy(outputs, targets) + outputs.mean(0).square().sum()


@dataclass
class Unhashable:
    """A record, which Python gives no hash."""

    factor: float = 2.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.factor * cross_entropy(outputs, targets)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.out(self.cells(x[..., None])[0][:, -1])
        return last


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.T


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


ALONE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "BatchNorm": (with_norm, {}, "BatchNorm1d looks at a whole mini-batch"),
    "a recurrent layer": (lambda: Last().double(), {}, "recurrent layers"),
    "alpha dropout": (
        lambda: nn.Sequential(nn.AlphaDropout(0.5), smooth()), {}, "AlphaDropout on cpu draws masks"
    ),
    "dropout along the batch": (
        lambda: nn.Sequential(Turned(), nn.Dropout(0.5), Turned(), smooth()),
        {},
        "depends on others",
    ),
    "random numbers": (lambda: Noisy(4, 3).double(), {}, "a trial stack fails: RuntimeError: vmap"),
    "a loss that is no mean": (smooth, {"loss": of_both}, "its loss is no mean over samples"),
    "samples that are compared": (lambda: Centred(4, 3).double(), {}, "depends on others"),
    "class weights": (
        smooth,
        {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))},
        "its loss is no mean over samples",
    ),
    "a loss without hash": (smooth, {"loss": Unhashable()}, "one has no hash"),
    "autocast": (smooth, {"autocast": torch.bfloat16}, "it runs in torch.bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_what_cannot_be_stacked_is_trained_one_by_one_and_said_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    build, options, reason = ALONE[name]
    torch.manual_seed(4)
    problems = classified(build(), **options)
    assert_the_same_bits(ROWS["fedavg"], problems, reason, caplog)


def test_a_problem_whose_gradient_was_replaced_is_trained_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problems = classified(smooth())
    for problem in problems:
        problem.gradient = partial(halved, problem.gradient, problem.model)
    assert_the_same_bits(ROWS["fedavg"], problems, "it has a gradient of its own", caplog)


def halved(gradient: Callable[..., tuple[Tensor, Tensor]], model: FlatModel, *batch: Any) -> Any:
    found = gradient(*batch)
    model.gradient /= 2
    return found


def weighted(rare: int) -> nn.Module:
    return nn.CrossEntropyLoss(1.0 + 8.0 * nn.functional.one_hot(torch.tensor(rare), 3).double())


@pytest.mark.parametrize("no_mean", [weighted, lambda rare: nn.CrossEntropyLoss(ignore_index=rare)])
def test_a_loss_that_is_no_mean_for_a_class_that_no_trial_saw_is_trained_one_by_one(
    no_mean: Callable[[int], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    targets = classified(smooth())[0].whole[1].tolist()
    (rare,) = {0, 1, 2} - {targets[0], next(y for y in targets if y != targets[0])}
    problems = classified(smooth(), loss=no_mean(rare))
    assert obstacle(problems[0]) == ""
    assert_the_same_bits(ROWS["fedavg"], problems, "its loss is no mean over samples", caplog)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(label_smoothing=0.1), lambda o, y: 2.0 * cross_entropy(o, y)]
)
def test_any_mean_over_samples_is_stacked(loss: Any) -> None:
    assert_alike(ROWS["fedavg"], classified(smooth(), loss=loss), local=local())


@pytest.mark.parametrize(
    ("name", "settings", "chunk", "reason"),
    [
        ("per-fedavg", {"solver": "sgd"}, 99, "per-fedavg draws masks in addition"),
        ("per-fedbc", {"solver": "sgd"}, 99, "per-fedbc draws masks in addition"),
        ("scaffold", {"solver": "sgd"}, 99, "scaffold draws masks in addition"),
        ("fedavg", {"solver": "delta-sgd"}, 99, "delta-sgd draws masks in addition"),
        ("fedavg", {"residual": 0.0}, 99, "residual draws masks in addition"),
        ("fedavg", {}, 2, "samples are computed in parts"),
    ],
)
def test_clients_that_draw_masks_in_addition_to_those_of_local_steps_are_trained_one_by_one(
    name: str,
    settings: dict[str, Any],
    chunk: int,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    problems = classified(nn.Sequential(nn.Dropout(0.5), smooth()).double(), sizes=(7, 12, 3))
    with mock.patch("clients.stacking.fit.CHUNK", chunk):
        option = {"option": "I"} if name == "scaffold" else {}
        assert_the_same_bits(ROWS[name], problems, reason, caplog, option, **settings)


def test_solvers_that_are_not_stacked_are_run_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    problems = classified(smooth())
    lbfgs = {"solver": "lbfgs", "epochs": 1}
    assert_the_same_bits(
        ROWS["fedavg"], problems, "'lbfgs' does not run on stacks", caplog, **lbfgs
    )


def assert_the_same_bits(
    row: Row,
    problems: Sequence[Problem],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    hyperparameters: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> None:
    made, options = clients_of(problems), {"local": local(**settings), **hyperparameters}
    with caplog.at_level(logging.INFO, "flwr"):
        caplog.clear()
        found = run(row, stacked(made, len(problems)), problems, **options)
        said = [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()]
    expected = run(row, one_by_one(made, len(problems)), problems, **options)
    assert len(said) == 1
    assert reason in said[0]
    pairs = zip(*(r.arrays.to_numpy_ndarrays() for r in (found, expected)), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)


def test_arrays_of_each_clients_own_are_trained_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = smooth()
    model = FlatModel(module, share="!2")
    problems = [
        Problem(model, cross_entropy, p.inputs, p.targets, rows=p.rows)
        for p in classified(smooth())
    ]
    assert_the_same_bits(ROWS["fedavg"], problems, "arrays are each client's own", caplog)


def test_a_client_class_of_ones_own_is_asked_itself() -> None:
    class Mine(FedAvgClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return parameters, 7, {"mine": 1}

    problems = classified(smooth())
    clients = [Mine(p, client_id=i) for i, p in enumerate(problems)]
    outcomes = fit_all(clients, start(problems), [{}] * len(clients), stack=9)
    assert all(samples == 7 for _, samples, _ in outcomes)  # type: ignore[misc]


def test_negative_targets_which_a_mean_leaves_out_are_not_stacked() -> None:
    problems = classified(smooth())
    problems[0].targets[0] = -100
    clients = [FedAvgClient(p, client_id=i) for i, p in enumerate(problems)]
    outcomes = fit_all(clients, start(problems), [{}] * len(clients), stack=9)
    alone = [client.fit(start(problems), {}) for client in clients]
    for (mine, *_), (theirs, *_) in zip(outcomes, alone, strict=True):  # type: ignore[misc]
        assert all(map(np.array_equal, mine, theirs))


# ---- failures -----------------------------------------------------------------------------------

ASKED: dict[str, Any] = {
    "algorithm": "fedadmm", "rho": 0.5, "local-start": "client", "tracking": "client",
    "server-round": 1, "seed": 2, "acked-round": -1,
}  # fmt: skip


def test_a_client_that_fails_takes_no_other_with_it() -> None:
    problems = classified(smooth())
    contexts = [Context(1, i, {}, RecordDict(), {}) for i in range(len(problems))]

    def made(number: int, **others: Any) -> FederatedClient:
        keeps = {"store": ContextStore(contexts[number]), **others}
        return AnyAlgorithmClient(problems[number], client_id=number, **keeps)

    clients = [made(0), made(1, store=None), made(2), made(3, max_steps=1), made(4)]
    configs = [dict(ASKED) for _ in clients]
    configs[2]["rho"] = -1.0
    configs[3]["steps"] = 2
    clients.append(made(4))
    configs.append({**ASKED, "algorithm": "fedfoo"})
    outcomes = fit_all(clients, start(problems), configs, stack=9)
    words = {
        1: "give them a store",
        2: "rho must be > 0",
        3: "takes at most 1",
        5: "unknown algorithm",
    }
    for number, word in words.items():
        assert isinstance(outcomes[number], ValueError)
        assert word in str(outcomes[number])
    for number in (0, 4):
        contexts[number].state.clear()
        arrays, samples, _ = made(number).fit(start(problems), configs[number])
        mine = outcomes[number]
        assert not isinstance(mine, Exception)
        assert relative(mine[0], arrays) < EXACT
        assert mine[1] == samples


def test_a_store_that_fails_in_the_end_fails_its_client_alone() -> None:
    problems = classified(smooth())
    contexts = [Context(1, i, {}, RecordDict(), {}) for i in range(len(problems))]
    clients = [
        AnyAlgorithmClient(p, client_id=i, store=ContextStore(contexts[i]))
        for i, p in enumerate(problems)
    ]
    save = ContextStore.save

    def full(self: ContextStore, *args: Any) -> None:
        if self.context is contexts[2]:
            raise OSError("no space left")
        save(self, *args)

    with mock.patch.object(ContextStore, "save", full):
        outcomes = fit_all(clients, start(problems), [ASKED] * len(clients), stack=9)
    assert [isinstance(outcome, OSError) for outcome in outcomes] == [False, False, True] + 2 * [
        False
    ]


def test_what_fails_on_a_stack_is_trained_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    problems = classified(smooth())
    clients = [FedAvgClient(p, client_id=i) for i, p in enumerate(problems)]
    asked = {"server-round": 1, "seed": 2}
    broken = mock.patch("clients.stacking.solve.plan", side_effect=RuntimeError("no rule"))
    with broken, caplog.at_level(logging.INFO, "flwr"):
        outcomes = fit_all(clients, start(problems), [asked] * len(clients), stack=9)
    assert "one by one: RuntimeError: no rule" in caplog.text
    for client, outcome in zip(clients, outcomes, strict=True):
        assert not isinstance(outcome, Exception)
        assert all(map(np.array_equal, outcome[0], client.fit(start(problems), asked)[0]))
