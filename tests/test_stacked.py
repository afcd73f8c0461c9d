"""Clients trained as one stack are the clients trained one by one.

Tolerances are relative, in the 2-norm: 1e-12 in float64 on smooth problems, where each of some 20
steps adds a few rounding errors of 1e-16 and none is amplified more than about a hundredfold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from laws import TABLE, Row, local, one_of_each_mechanism
from stacked_runs import (
    EXACT,
    ROWS,
    SINGLE,
    assert_alike,
    classified,
    relative,
    smooth,
    start,
)
from stacked_runs import nothing_was_said as nothing_was_said
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from clients import CLIENTS, Border, FedProxClient, Problem
from clients.stacking import choice
from clients.stacking.fit import fit_all
from simulations import models

BATCHES: dict[str, Any] = {"solver": "sgd", "batch-size": 5, "epochs": 2}

# ---- every algorithm ----------------------------------------------------------------------------

ON_STACKS = [row for row in TABLE if CLIENTS[row.name].stacks]
every_row = pytest.mark.parametrize("row", ON_STACKS, ids=str)


@pytest.mark.sampled
@every_row
@pytest.mark.parametrize("settings", [{}, {"solver": "sgd", "batch-size": 5, "epochs": 3}], ids=str)
def test_every_algorithm_on_a_stack_is_the_algorithm(row: Row, settings: dict[str, Any]) -> None:
    assert_alike(row, classified(smooth()), local=local(**settings))


@one_of_each_mechanism
def test_every_algorithm_in_single_precision(row: Row) -> None:
    problems = classified(smooth(torch.float32))
    assert_alike(row, problems, within=SINGLE, local=local(**BATCHES))


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("fedpd-vr", {"inner_steps": 3, "inner_batch": 4, "full_every": 2}),
    ("fedpd-vr", {"inner_steps": 2, "inner_batch": 0}),
    ("fedpd", {"p": 0.6, "x0_rule": "authors"}),
    ("scaffold", {"option": "I"}),
    ("per-fedavg", {"meta_gradient": "first-order"}),
    ("pfedme", {"local_start": "global"}),
    ("fedadmm", {"local_start": "global", "tracking": "global"}),
    ("fedbc", {"gamma": 5.0, "alpha_gamma": None}),
    ("fedbc", {"fraction_train": 0.6}),
    ("fedbcd", {"gamma": [0.1, 0.2, 0.3, 0.4, 0.5]}),
    ("fedbcd-i", {"fraction_train": 0.4, "box": 1.5}),
    ("fednova", {"mu": 0.5}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_variants_of_algorithms_on_a_stack(name: str, options: dict[str, Any]) -> None:
    assert_alike(ROWS[name], classified(smooth()), local=local(**BATCHES), **options)


def test_a_request_may_give_each_client_its_own_hyperparameters() -> None:
    problems = classified(smooth())
    clients = [FedProxClient(p, client_id=i) for i, p in enumerate(problems)]
    asked = {"server-round": 1, "seed": 2, "batch-size": 5, "epochs": 2, "lr": 0.1}
    configs = [asked | {"proximal-mu": float(i)} for i in range(len(clients))]
    found, expected, of_one = (
        fit_all(clients, start(problems), of, stack=stack)
        for of, stack in ((configs, 9), (configs, "off"), ([configs[0]] * len(clients), 9))
    )
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert relative(mine[0], theirs[0]) < EXACT  # type: ignore[index]
        assert number == 0 or relative(mine[0], of_one[number][0]) > 1e-3  # type: ignore[index]


# ---- solvers ------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight-decay": 0.1},
    {"solver": "gd", "momentum": 0.5},
    {"solver": "delta-sgd"},
    {"solver": "delta-sgd", "solver-params": "same_batch=False amplify_first=True epsilon=1e-8"},
    {"box": 0.4},
    {"extrapolation": 0.3, "box": 0.9},
    {"steps": 4},
    {"steps": 5, "random-steps": True},
    {"random-epochs": True, "epochs": 5},
]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("fedadmm", settings) for settings in SETTINGS),
        *(("ditto", settings) for settings in SETTINGS[::4]),
    ],
    ids=str,
)
@pytest.mark.sampled
def test_every_solver_on_a_stack_is_the_solver(name: str, settings: dict[str, Any]) -> None:
    """FedADMM's subproblem has a slope and a pull; Ditto solves twice from one stream."""
    assert_alike(ROWS[name], classified(smooth()), local=local(**BATCHES | settings))


# ---- data and models ----------------------------------------------------------------------------


def test_clients_have_tensors_in_common_or_their_own() -> None:
    settings = local(**BATCHES)
    assert_alike(ROWS["fedadmm"], classified(smooth(), shared=False), local=settings)


def test_samples_beyond_a_chunk_go_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.stacking.stack.PIECE", 6)
    for row, others in (("scaffold", {"option": "I"}), ("q-fedavg", {})):
        settings = local(**BATCHES | {"batch-size": 4})
        assert_alike(ROWS[row], classified(smooth()), local=settings, **others)


class Regression(nn.Module):
    stacks = True

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.out(x)[:, 0]
        return summed


LOSSES: list[tuple[Any, Any]] = [
    (mse_loss, lambda rng, n: rng.normal(size=n)),
    (nn.HuberLoss(delta=0.3), lambda rng, n: rng.normal(size=n)),
    (nn.BCEWithLogitsLoss(), lambda rng, n: rng.integers(2, size=n).astype(np.float64)),
]


@pytest.mark.parametrize(("loss", "targets"), LOSSES)
def test_targets_may_be_numbers(loss: Any, targets: Any) -> None:
    """Then there is no accuracy."""
    model, rng = Border(Regression().double()), np.random.default_rng(2)
    problems = [
        Problem(model, loss, torch.from_numpy(rng.normal(size=(n, 4))), torch.from_numpy(y))
        for n, y in ((n, targets(rng, n)) for n in (3, 8, 5))
    ]
    assert_alike(ROWS["fedavg"], problems, local=local(**BATCHES | {"batch-size": 4}))


def penalty(w: Tensor) -> Tensor:
    return 0.05 * (w**2 / (1 + w**2)).sum()


def test_a_penalty_is_each_clients() -> None:
    problems = classified(smooth(), penalty=penalty)
    assert_alike(ROWS["per-fedavg"], problems, local=local(**BATCHES))


def tied() -> nn.Module:
    """Return a module of which two layers are one."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Linear(4, 3)).double()


def frozen() -> nn.Module:
    module = smooth()
    module[0].requires_grad_(False)
    return module


class Skipping(nn.Module):
    """A forward pass of one's own, of layers that stacks take."""

    stacks = True

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x + torch.tanh(self.inside(x)))
        return out


MODELS: dict[str, tuple[Any, Sequence[int]]] = {
    "tied": (tied, (4,)),
    "frozen": (frozen, (4,)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), (4,)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(),
            nn.Linear(16, 3),
        ),
        (2, 6, 6),
    ),
    "binary": (lambda: models.build("binary", (4,), 3, seed=1), (4,)),
    "a class of one's own": (Skipping, (4,)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_of_layers_that_stacks_take_are_stacked(name: str) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(4)
    problems = classified(build().double(), shape=shape)
    assert_alike(ROWS["fedadmm"], problems, local=local(**BATCHES))


def test_kinds_of_models() -> None:
    assert choice.kind_of(smooth()) == "dense"
    assert choice.kind_of(MODELS["convolutions"][0]()) == "conv"
    assert choice.kind_of(MODELS["layer norm"][0]()) == "other"
