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
from laws import OWN_STEPS, TABLE, Row, local
from stacked_runs import (
    ROWS,
    SINGLE,
    assert_alike,
    classified,
    smooth,
)
from stacked_runs import nothing_was_said as nothing_was_said
from torch import Tensor, nn
from torch.func import vmap

from clients import (
    FlatModel,
    Problem,
)
from clients.stacking import choice
from clients.stacking.masks import Masks, masked

# ---- every algorithm ----------------------------------------------------------------------------

every_row = pytest.mark.parametrize("row", TABLE, ids=str)


@pytest.mark.sampled
@every_row
@pytest.mark.parametrize("settings", [{}, {"solver": "sgd", "batch-size": 5, "epochs": 3}], ids=str)
def test_every_algorithm_on_a_stack_is_the_algorithm(row: Row, settings: dict[str, Any]) -> None:
    assert_alike(row, classified(smooth()), local=local(**settings))


@every_row
@pytest.mark.sampled
def test_every_algorithm_in_single_precision(row: Row) -> None:
    problems = classified(smooth(torch.float32))
    assert_alike(row, problems, within=SINGLE, local=local(solver="sgd", **{"batch-size": 5}))


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
    ("moon", {"mu": 5.0, "tau": 0.2, "fraction_train": 0.6}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_variants_of_algorithms_on_a_stack(name: str, options: dict[str, Any]) -> None:
    assert_alike(
        ROWS[name], classified(smooth()), local=local(solver="sgd", **{"batch-size": 5}), **options
    )


# ---- solvers ------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight-decay": 0.1},
    {"solver": "sgd", "solver-params": "dampening=0.5", "momentum": 0.5},
    {"solver": "gd", "momentum": 0.5, "residual": 0.0},
    {"solver": "adam", "lr": 0.01, "weight-decay": 0.1},
    {"solver": "adam", "lr": 0.01, "solver-params": "eps=0.01 amsgrad=True"},
    {"solver": "adagrad"},
    {"solver": "delta-sgd"},
    {"solver": "delta-sgd", "solver-params": "same_batch=False amplify_first=True epsilon=1e-8"},
    {"solver": "sps"},
    {"solver": "sps", "solver-params": "growth=0 max_step=0.3 f_star=0.1"},
    {"box": 0.4},
    {"extrapolation": 0.3, "box": 0.9},
    {"steps": 4},
    {"steps": 5, "random-steps": True},
    {"random-epochs": True, "epochs": 5},
    {"residual": 0.3, "epochs": 6, "weight-decay": 0.05},
    {"residual": 0.3, "steps": 7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["fedadmm", "ditto", "moon"])
@pytest.mark.sampled
def test_every_solver_on_a_stack_is_the_solver(name: str, settings: dict[str, Any]) -> None:
    """FedADMM's subproblem has a slope and a pull; Ditto solves twice from one stream; MOON's loss
    differs from client to client."""
    settings = {"solver": "sgd", "batch-size": 5, "epochs": 2} | settings
    assert_alike(ROWS[name], classified(smooth()), local=local(**settings))


def test_pfedme_measures_its_residual_on_a_stack() -> None:
    settings = local(solver="sgd", residual=0.2, **{"batch-size": 5})
    assert_alike(ROWS["pfedme"], classified(smooth()), local=settings)


@pytest.mark.slow
def test_variants_of_pfedmes_inner_solver_take_a_mini_batch_for_all_there_is() -> None:
    """SPS lets a step size grow by the share of the samples that a mini-batch is: here all."""
    settings = local(solver="sps", lr=0.01, **{"batch-size": 5})
    assert_alike(ROWS["pfedme"], classified(smooth()), local=settings)


# ---- data and models ----------------------------------------------------------------------------


def test_clients_have_tensors_in_common_or_their_own() -> None:
    settings = local(solver="sgd", **{"batch-size": 5})
    assert_alike(ROWS["fedadmm"], classified(smooth(), shared=False), local=settings)


def test_samples_beyond_a_chunk_go_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.stacking.stack.CHUNK", 6)
    for row, others in (("scaffold", {"option": "I"}), ("q-fedavg", {}), ("moon", {"mu": 5.0})):
        settings = local(solver="sgd", residual=0.0, **{"batch-size": 4})
        assert_alike(ROWS[row], classified(smooth()), local=settings, **others)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.out(x)[:, 0]
        return summed


def rooted(outputs: Tensor, targets: Tensor) -> Tensor:
    return (1.0 + (outputs - targets) ** 2).sqrt().mean()


def test_targets_may_be_numbers_and_the_loss_ones_own() -> None:
    """Then there is no accuracy, and the loss of a sample is that of a batch of one."""
    model = FlatModel(Regression().double())
    rng = np.random.default_rng(2)
    problems = [
        Problem(model, rooted, *map(torch.from_numpy, pair))
        for pair in ((rng.normal(size=(n, 4)), rng.normal(size=n)) for n in (3, 8, 5))
    ]
    assert_alike(ROWS["fedavg"], problems, local=local(solver="sgd", **{"batch-size": 4}))


def penalty(w: Tensor) -> Tensor:
    return 0.05 * (w**2 / (1 + w**2)).sum()


@pytest.mark.parametrize("name", ["fedavg", "moon", "per-fedavg", "q-fedavg", "scaffold"])
def test_a_penalty_is_each_clients(name: str) -> None:
    problems = classified(smooth(), penalty=penalty)
    assert_alike(ROWS[name], problems, local=local(solver="sgd", **{"batch-size": 5}))


def tied() -> nn.Module:
    """Return a module of which two layers are one."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Linear(4, 3)).double()


def frozen() -> nn.Module:
    module = smooth()
    module[0].requires_grad_(False)
    return module


IMAGE, TEXT = (2, 6, 6), (7,)
MODELS: dict[str, tuple[Any, Sequence[int]]] = {
    "tied": (tied, (4,)),
    "frozen": (frozen, (4,)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), (4,)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(),
            nn.Linear(16, 3),
        ),
        IMAGE,
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Tanh(), nn.Linear(21, 3)), TEXT
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("algorithm", ["fedadmm", "moon", "scaffold"])
@pytest.mark.sampled("fedadmm")
def test_models_that_vmap_takes_are_stacked(name: str, algorithm: str) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(4)
    inputs = torch.randint(9, (99, 7), dtype=torch.uint8) if shape == TEXT else None
    problems = classified(build().double(), shape=shape, inputs=inputs)
    assert_alike(ROWS[algorithm], problems, local=local(solver="sgd", **{"batch-size": 5}))


class Dropping(nn.Module):
    """Dropout in a module that is called as it is, one layer of it at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.drop = nn.Linear(4, 6), nn.Linear(6, 3), nn.Dropout(0.4)
        self.rare = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.drop(torch.tanh(self.first(self.rare(x))))
        out: Tensor = self.drop(self.out(self.rare(z).unflatten(1, (1, 6))))[:, 0]
        return out


DROPOUT: dict[str, Any] = {
    "in a chain": lambda: nn.Sequential(
        nn.Dropout(0.2), nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3),
        nn.Dropout(0.0),
    ),
    "in a module": Dropping,
}  # fmt: skip
SOLVING = [row for row in TABLE if row.name not in OWN_STEPS]
"""The algorithms whose rules draw masks for mini-batches of local steps alone."""


@pytest.mark.parametrize("place", DROPOUT)
@pytest.mark.parametrize("row", SOLVING, ids=str)
@pytest.mark.sampled
def test_dropout_draws_the_masks_that_each_client_draws_alone(row: Row, place: str) -> None:
    torch.manual_seed(4)
    problems = classified(DROPOUT[place]().double())
    before = torch.get_rng_state()
    settings = {"batch-size": 5, "epochs": 2, "momentum": 0.0}
    settings = {} if row.name == "fedsgd" else settings
    assert_alike(row, problems, local=local(solver="sgd", **settings))
    assert torch.equal(torch.get_rng_state(), before)


def test_masks_are_drawn_client_by_client_wherever_vmap_has_their_dimension() -> None:
    drawing, p, layer = Masks([1, 2]), 0.3, nn.Dropout(0.3)
    x = torch.ones(3, 2, 4)
    with masked(layer, drawing), drawing.of(np.array([1, 0]), np.array([3, 2])):
        found = vmap(layer, in_dims=1)(x)
        with pytest.raises(RuntimeError, match=r"under torch\.vmap alone"):
            layer(x)
    for mine, seed, size in zip(found, (2, 1), (3, 2), strict=True):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            assert torch.equal(mine[:size], torch.dropout(torch.ones(size, 4), p, True))
        assert not mine[size:].any()
    with (
        pytest.raises(RuntimeError, match="further masks than those of local steps"),
        masked(layer, drawing),
    ):
        vmap(layer)(x)


@pytest.mark.parametrize("settings", [s for s in SETTINGS if not {"residual"} & s.keys()], ids=str)
def test_solvers_with_dropout_on_a_stack(settings: dict[str, Any]) -> None:
    settings = {"solver": "sgd", "batch-size": 5, "epochs": 2} | settings
    if settings["solver"] != "delta-sgd":
        problems = classified(DROPOUT["in a module"]().double())
        assert_alike(ROWS["fedadmm"], problems, local=local(**settings))


def test_kinds_of_models() -> None:
    assert choice.kind_of(smooth()) == "dense"
    assert choice.kind_of(MODELS["convolutions"][0]()) == "conv"
    assert choice.kind_of(MODELS["layer norm"][0]()) == "other"
