"""FedSGD: it is gradient descent on all examples, and FedAvg with that setting, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from laws import RATE, START, train
from problems import DIM, grid, quadratics, to_record, to_vector
from torch.nn.functional import cross_entropy

from clients import AnyAlgorithmClient, Border, LocalTraining, Problem, client_app, client_id
from clients.node.in_process import InProcessGrid
from fl_strategies import FedAvg, FedSGD
from simulations import models

ONE_STEP = {"solver": "gd", "lr": RATE, "epochs": 1}


def one(**options: Any) -> FedSGD:
    return FedSGD(**{"fraction_evaluate": 0.0, "local": {"lr": RATE}, **options})


def test_fedsgd_is_gradient_descent_on_the_samples_of_all_clients() -> None:
    problems, theta = quadratics(4), START
    X, y = np.concatenate([q.X for q in problems]), np.concatenate([q.y for q in problems])
    for _ in range(5):
        theta = theta - RATE * X.T @ (X @ theta - y) / len(y)
    np.testing.assert_allclose(train(one(), grid(problems), 5), theta, rtol=1e-12)


def test_a_network_steps_as_if_one_machine_held_all_examples() -> None:
    rng = np.random.default_rng(3)
    x, y = torch.tensor(rng.normal(size=(23, 1, 4, 4))), torch.tensor(rng.integers(0, 3, 23))
    parts = [slice(0, 4), slice(4, 15), slice(15, 23)]

    def network() -> Border:
        return Border(models.build("mlp", (1, 4, 4), 3, seed=0).double())

    def client_fn(context: Any) -> AnyAlgorithmClient:
        i = client_id(context)
        return AnyAlgorithmClient(
            Problem(network(), cross_entropy, x[parts[i]], y[parts[i]]), client_id=i
        )

    central = network()
    module = central.module
    initial = [a.copy() for a in central.arrays(central.vector)]
    for _ in range(3):
        module.zero_grad()
        cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= RATE * parameter.grad
    from flwr.app import Array, ArrayRecord

    record = ArrayRecord({n: Array(a) for n, a in zip(central.names, initial, strict=True)})
    result = one().start(InProcessGrid(client_app(client_fn), 3), record, 3).arrays
    expected = central.arrays(central.vector)
    for name, array in zip(central.names, expected, strict=True):
        np.testing.assert_allclose(result[name].numpy(), array, rtol=1e-9, err_msg=name)
        assert np.abs(array - record[name].numpy()).max() > 1e-3


def test_fedsgd_is_fedavg_with_one_epoch_of_gradient_descent_to_the_bit() -> None:
    options = {"fraction_evaluate": 0.0, "fraction_train": 0.5, "seed": 3}
    np.testing.assert_array_equal(
        train(FedSGD(**options, local={"lr": RATE}), grid(quadratics(5)), 6),
        train(FedAvg(**options, local=ONE_STEP), grid(quadratics(5)), 6),
    )


def test_what_a_client_would_do_by_itself_does_not_matter() -> None:
    problems = quadratics(3)
    own = LocalTraining(
        solver="sgd", epochs=3, batch_size=2, momentum=0.9, extrapolation=0.5, box=0.1
    )
    np.testing.assert_array_equal(
        train(one(), grid(problems, training=own), 3), train(one(), grid(problems), 3)
    )


def test_the_rate_follows_its_schedule_and_weight_decay_is_a_term_of_the_loss() -> None:
    problems, theta, decay = quadratics(3), START, 0.3
    sizes = np.array([q.n for q in problems]) / sum(q.n for q in problems)
    for lr in (0.2, 0.2, 0.05):
        gradient = sizes @ np.array([q.gradient(theta) for q in problems])
        theta = theta - lr * (gradient + decay * theta)
    settings = {"lr": {1: 0.2, 3: 0.05}, "weight-decay": decay}
    found = to_vector(one(local=settings).start(grid(problems), to_record(START), 3).arrays)
    np.testing.assert_allclose(found, theta, rtol=1e-12)
    assert found.shape == (DIM,)


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ({"solver": "sgd"}, r"solver must be 'gd', got 'sgd'"),
        ({"epochs": 5}, r"epochs must be 1, got 5"),
        ({"epochs": {1: 1, 9: 2}}, r"epochs must be 1, got {1: 1, 9: 2}"),
        ({"steps": 2}, r"steps must be one of \[0, 1\], got 2"),
        ({"momentum": 0.9}, r"momentum must be 0.0, got 0.9"),
        ({"nesterov": True}, "nesterov must be False"),
        ({"extrapolation": 0.5}, "extrapolation must be 0.0"),
        ({"box": 1.0}, "box must be 0.0"),
        ({"solver-params": "maximize=true"}, "solver-params must be ''"),
    ],
)
def test_settings_that_make_it_something_else_are_refused(
    setting: dict[str, Any], allowed: str
) -> None:
    with pytest.raises(ValueError, match=allowed + ".*one gradient step on all samples"):
        one(local={"lr": RATE, **setting})
