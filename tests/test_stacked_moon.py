"""MOON's clients on a stack: each has its own fixed models, features, weight and temperature."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from laws import local
from stacked_runs import (
    EXACT,
    ROWS,
    assert_alike,
    classified,
    clients_of,
    relative,
    run,
    smooth,
    stacked,
    start,
)
from stacked_runs import nothing_was_said as nothing_was_said
from torch import Tensor, nn

from clients import ContextStore, FlatModel, MOONClient, Problem
from clients import moon as moon_module
from clients.learning.memory import client_bytes
from clients.stacking.fit import fit_all
from clients.stacking.moon import bytes_of, contrasts
from clients.stacking.stack import Stack
from fl_strategies import moon


class Scaled(nn.Module):
    """A module whose features depend on a floating-point buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("scale", torch.ones(5))
        self.register_buffer("shift", torch.zeros(2, 5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.scale * self.hidden(x) + self.shift.sum(0)))
        return out


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("build", [smooth, lambda: Scaled().double()])
def test_gradients_of_a_stack_are_each_clients(build: Any, shared: bool) -> None:
    """Sizes of one to 40 samples, of which some belong to several clients."""
    problems = classified(build(), sizes=(7, 40, 1, 16, 12), shared=shared)
    model, count = problems[0].model, len(problems)
    again = problems[1]
    rows = again.rows[[3, 3, 1]] if shared else None
    problems[4] = Problem(model, again.loss, again.inputs, again.targets, rows=rows)
    rng = np.random.default_rng(5)
    d = len(model.vector)
    b = sum(buffer.numel() for buffer in moon_module.statistics(model.module))
    w, theta, v = torch.from_numpy(rng.normal(size=(3, count, d)))
    state = moon.State(w, torch.from_numpy(rng.normal(size=(count, b))))
    asked = {"mu": rng.uniform(1.0, 5.0, (count, 1)), "tau": rng.uniform(0.2, 1.0, (count, 1))}
    columns = {name: torch.from_numpy(column) for name, column in asked.items()}
    with mock.patch("clients.stacking.stack.CHUNK", 6):
        made = contrasts(Stack(problems), state, theta, **columns)
    model.module.train()
    found = made.full_gradient(v)
    chosen = np.array([3, 1])
    of_two = made.full_gradient(v[torch.from_numpy(chosen)], chosen)
    for i, problem in enumerate(problems):
        mine = moon.State(*(vectors[i] for vectors in state))
        options = {name: float(column[i, 0]) for name, column in asked.items()}
        alone = moon_module.contrast(problem, mine, theta[i], **options)
        model.vector.copy_(v[i])
        model.module.train()
        alone.gradient(*alone.whole)
        own = model.gradient.clone()
        assert (found[i] - own).norm() <= EXACT * own.norm()
        for row in of_two[chosen == i]:
            assert (row - own).norm() <= EXACT * own.norm()
        problem.gradient(*problem.whole)
        assert (own - model.gradient).norm() > 1e-3 * own.norm()


def test_a_request_may_give_each_client_its_own_weight_and_temperature() -> None:
    problems = classified(smooth())
    first, rng = start(problems), np.random.default_rng(3)
    second = [array + rng.normal(0.0, 0.3, array.shape) for array in first]
    uploads: dict[Any, list[list[np.ndarray]]] = {}
    for setting in ("off", 9):
        stores = [ContextStore(Context(1, i, {}, RecordDict(), {})) for i in range(len(problems))]
        clients = [
            MOONClient(p, client_id=i, store=store)
            for i, (p, store) in enumerate(zip(problems, stores, strict=True))
        ]
        for number, arrays in ((1, first), (2, second)):
            asked = {"server-round": number, "acked-round": number - 1 or -1, "seed": 2,
                     "batch-size": 5, "epochs": 2, "lr": 0.1}  # fmt: skip
            configs = [asked | {"mu": 1.0 + i, "tau": 0.2 + 0.1 * i} for i in range(len(clients))]
            outcomes = fit_all(clients, arrays, configs, stack=setting)
            assert not any(isinstance(outcome, Exception) for outcome in outcomes)
        uploads[setting] = [outcome[0] for outcome in outcomes]  # type: ignore[index]
    for mine, theirs in zip(uploads[9], uploads["off"], strict=True):
        assert relative(mine, theirs) < EXACT


def test_features_count_towards_the_memory_of_a_stack() -> None:
    """Five features of 400 samples in three places, and 8 bytes for each number."""
    problems = classified(smooth(), sizes=(400,) * 4)
    clients = [MOONClient(p, client_id=i) for i, p in enumerate(problems)]
    assert bytes_of(problems[0]) == 3 * 400 * 5 * 8
    own = sum(client_bytes(problems[0], 5))
    asked = {"batch-size": 5, "mu": 1.0, "tau": 0.5}
    seen: list[int] = []
    with mock.patch(
        "clients.stacking.fit._stacked", lambda some, *_: seen.append(len(some)) or [0] * len(some)
    ):
        memory = 2 * (own + bytes_of(problems[0]))
        fit_all(clients, start(problems), [asked] * 4, stack=9, memory=memory)
    assert seen == [2, 2]


# ---- which models -------------------------------------------------------------------------------


class Probed(nn.Module):
    """Outputs are each sample's own. The linear layer that runs last sees all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out, self.probe = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.hidden(x))
        out: Tensor = self.out(z)
        return out + 0.0 * self.probe(z - z.mean(0))


def test_a_model_whose_features_depend_on_other_samples_is_trained_one_by_one_with_moon_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problems = classified(Probed().double())
    made = clients_of(problems)
    for name, reason in (("fedavg", ""), ("moon", "a sample's depends on others")):
        with caplog.at_level(logging.INFO, "flwr"):
            caplog.clear()
            run(ROWS[name], stacked(made, len(problems)), problems, local=local())
        said = [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()]
        assert [reason in text for text in said] == [True] * bool(reason)


def test_a_head_may_be_named() -> None:
    """In a chain of layers, and in a module that is called as it is."""
    for build, head in ((smooth, "0"), (smooth, "1"), (smooth, ""), (Scaled, "out")):
        model = FlatModel(build().double(), head=head)
        problems = [
            Problem(model, p.loss, p.inputs, p.targets, rows=p.rows) for p in classified(smooth())
        ]
        assert_alike(ROWS["moon"], problems, local=local(solver="sgd"), mu=3.0)


def test_with_features_that_no_parameter_moves_a_stack_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problems = classified(nn.Linear(4, 3).double())
    moon_module.warn_of_no_effect.cache_clear()
    assert_alike(ROWS["moon"], problems, local=local(solver="sgd"))
    assert caplog.text.count("features do not depend on its parameters: with it MOON") == 1
