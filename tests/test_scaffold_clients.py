"""SCAFFOLD: the client, vectors beside the model, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from laws import START, local, quiet
from problems import DIM, Formula, Linear, grid, half_mean_square, quadratics, to_record, to_vector
from torch import Tensor
from torch.nn.functional import cross_entropy

from clients import (
    AnyAlgorithmClient,
    Batch,
    Border,
    ContextStore,
    LocalTraining,
    Problem,
    SCAFFOLDClient,
)
from fl_strategies import SCAFFOLD, scaffold
from fl_strategies.core.oracle import Solved
from fl_strategies.solvers.gradient_weights import weight_of
from simulations import models

one = partial(quiet, SCAFFOLD)


# ---- the client by itself -----------------------------------------------------------------------


class Recording(Problem):
    """Remembers the gradient of each step that training took."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[Tensor] = []

    def gradient(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        found = super().gradient(batch)
        self.seen.append(self.model.gradient)
        return found

    def full_gradient(self) -> Tensor:
        loss = super().full_gradient()
        self.seen.pop()
        return loss


@pytest.mark.parametrize(
    "settings",
    [
        {"batch-size": 3, "epochs": 2},
        {"batch-size": 3, "epochs": 6, "random-epochs": True},
        {"batch-size": 2, "steps": 9, "random-steps": True},
        {"solver": "gd", "epochs": 5, "residual": 1e9},
    ],
    ids=["a last batch of one", "random epochs", "random steps", "stopped early"],
)
def test_a_clients_c_is_the_mean_of_the_gradients_of_the_steps_it_took(
    settings: dict[str, Any],
) -> None:
    """7 examples; also through the plain NumPyClient, given what the last request acknowledges."""
    (q,) = quadratics(1)
    problem = Recording(Border(Linear()), half_mean_square, torch.tensor(q.X), torch.tensor(q.y))
    context = next(iter(grid([q]).contexts.values()))
    client = AnyAlgorithmClient(problem, client_id=0, store=ContextStore(context))
    rng = np.random.default_rng(1)
    own = np.zeros(DIM)
    for number in (1, 2, 3):
        theta, c = rng.normal(size=DIM), rng.normal(size=DIM)
        parameters = [a for v in (theta, c) for a in (v[:4].reshape(2, 2), v[4:])]
        problem.seen.clear()
        config = {"algorithm": "scaffold", "option": "II", "lr": 0.05, "seed": 3, **settings}
        config |= {"server-round": number, "acked-round": number - 1 if number > 1 else -1}
        arrays, examples, metrics = client.fit(parameters, config)
        assert (examples, metrics["steps"]) == (7, len(problem.seen))
        expected = np.mean([g.numpy() for g in problem.seen], axis=0)
        np.testing.assert_allclose(own + to_vector(arrays[2:]), expected, rtol=1e-9)
        walked = -0.05 * len(problem.seen) * (expected - own + c)
        np.testing.assert_allclose(to_vector(arrays[:2]), walked, rtol=1e-9)
        own = expected
    if "residual" in settings:
        assert metrics["steps"] == 1


def test_control_variates_lie_over_the_trainable_arrays_by_name() -> None:
    """One step: c_i+ is the gradient g and w - theta = -lr (g + c), array by array, also of filters
    that the client keeps channels-last; there is none for a running statistic."""
    rng = np.random.default_rng(5)
    model = Border(models.build("cnn-bn", (2, 4, 4), 3, seed=0).double())
    x, y = torch.tensor(rng.normal(size=(6, 2, 4, 4))), torch.tensor(rng.integers(0, 3, 6))
    context = next(iter(grid(quadratics(1)).contexts.values()))
    client = SCAFFOLDClient(
        Problem(model, cross_entropy, x, y),
        client_id=0,
        store=ContextStore(context),
        training=LocalTraining(solver="gd", lr=0.1),
    )
    trained = model.layout.trainable
    c = [rng.normal(size=model.layout.shapes[name]) for name in trained]
    arrays, _, _ = client.fit([*model.arrays(model.vector), *c], {"option": "II"})
    assert len(arrays) == len(model.names) + len(trained) > 2 * len(trained)
    moved = dict(zip(model.names, arrays, strict=False))
    for name, v, g in zip(trained, c, arrays[len(model.names) :], strict=True):
        assert v.shape == g.shape
        np.testing.assert_allclose(moved[name], -0.1 * (g + v), rtol=1e-9, atol=1e-12)


def test_arrays_without_a_control_variate_are_refused_with_the_numbers() -> None:
    (q,) = quadratics(1)
    client = SCAFFOLDClient(q.problem(), client_id=0)
    with pytest.raises(ValueError, match="scaffold takes 4 arrays for the model, control; 2 were"):
        client.fit([START[:4].reshape(2, 2), START[4:]], {"option": "II"})


def test_bytes_of_both_vectors_are_counted_both_ways() -> None:
    seen: dict[str, int] = {"down": 0, "up": 0}

    def listen(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            for way, message in (("down", request), ("up", reply)):
                arrays = message.content["arrays"]
                assert list(arrays) == ["head", "tail", "control/head", "control/tail"]
                seen[way] += sum(len(array.data) for array in arrays.values())
        return reply

    result = one().start(grid(quadratics(3), fault=listen), to_record(START), 1)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["bytes-down"], metrics["bytes-up"]) == (seen["down"], seen["up"])


# ---- what is refused ----------------------------------------------------------------------------

NO_STEPS = {
    "solver": "adam",
    "extrapolation": 0.5,
    "box": 1.0,
    "solver-params": "dampening=0.5",
}


@pytest.mark.parametrize("name", NO_STEPS)
def test_option_two_refuses_what_is_no_gradient_step(name: str) -> None:
    message = f"{name} must be .*got .*: "
    settings = local() | {name: NO_STEPS[name]}
    with pytest.raises(ValueError, match=f'{message}SCAFFOLD .*needs .*; use option="I"$'):
        one(local=settings)
    assert one(option="I", local=settings).option == "I"
    (q,) = quadratics(1)
    mine = {name.replace("-", "_"): NO_STEPS[name]}
    context = next(iter(grid([q]).contexts.values()))
    client = SCAFFOLDClient(
        q.problem(),
        client_id=0,
        store=ContextStore(context),
        training=LocalTraining(**mine),
    )
    arrays = [START[:4].reshape(2, 2), START[4:]] * 2
    with pytest.raises(ValueError, match=f"{message}the algorithm needs to know what"):
        client.fit(arrays, {"option": "II"})


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_momentum_a_clients_c_is_a_mean_of_its_gradients(nesterov: bool) -> None:
    """Of a constant gradient g it is g; steps counted one by one would make it 4 g and more."""
    g, w, v = np.arange(1.0, DIM + 1), np.zeros(DIM), np.zeros(DIM)
    for _ in range(10):
        v = 0.9 * v + g
        w = w - 0.1 * (g + 0.9 * v if nesterov else v)
    rates = 0.1 * weight_of(10, momentum=0.9, nesterov=nesterov)

    class Walked(Formula):
        def solve(self, start: Any, subproblem: Any, **_: Any) -> Solved:
            return Solved(w, steps=10, rates=rates)

    state = scaffold.first_state(np.zeros(DIM))
    new = scaffold.client_rule(state, 0.0 * w, Walked(), control=0.0 * w).state
    np.testing.assert_allclose(new.c, g, rtol=1e-12)
    assert (-w / (10 * 0.1) > 4.0 * g).all()


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"eta_g": 0.0}, r"eta_g must be > 0, got 0.0"),
        ({"eta_g": {1: 1.0, 5: -1.0}}, r"eta_g must be > 0, got -1.0"),
        ({"option": "III"}, r"option must be one of \['I', 'II'\], got 'III'"),
    ],
)
def test_bad_hyperparameters_are_refused_with_bound_and_value(
    hyperparameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SCAFFOLD(**hyperparameters)
