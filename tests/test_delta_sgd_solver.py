"""Delta-SGD in a client, inside federated algorithms, and under Flower's server optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from delta import Dropping, by_hand
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedYogi
from laws import START, train
from problems import (
    CENTRE,
    DIM,
    SLOPE,
    grid,
    optimum,
    quadratics,
    shared_minimiser,
    to_record,
    to_vector,
)
from torch import nn
from torch.nn.functional import cross_entropy

from clients import Border, LocalTraining, Problem, solve
from clients.learning.loop import make_optimizer
from fl_strategies import STRATEGIES
from fl_strategies.core.randomness import stream
from fl_strategies.core.subproblem import Subproblem
from simulations.config import RunConfig

# ---- as a local solver ----------------------------------------------------------------------


def test_the_solver_is_the_rule_on_the_subproblem() -> None:
    """13 examples in batches of 5; the rule gets the batches' gradients by matrices."""
    q, pull = quadratics(4)[3], 0.9
    training = LocalTraining(
        solver="delta-sgd", lr=0.3, solver_params="gamma=1.5 delta=0.4", epochs=3, batch_size=5
    )
    bent = Subproblem(torch.tensor(SLOPE), pull, torch.tensor(CENTRE))
    info = solve(q.problem(), torch.tensor(START), bent, training, stream(1, "local"))
    w = info.w
    rng, parts = stream(1, "local"), []
    for _ in range(3):
        parts += np.split(rng.permutation(q.n), [5, 10])

    def gradient(w: np.ndarray, k: int) -> np.ndarray:
        X, y = q.X[parts[k]], q.y[parts[k]]
        return X.T @ (X @ w - y) / len(y) + SLOPE + pull * (w - CENTRE)

    points, _ = by_hand(gradient, START, 9, eta=0.3, theta=1.0, gamma=1.5, delta=0.4)
    np.testing.assert_allclose(w, points[-1], rtol=1e-9)
    assert info.steps == 9


def test_delta_sgd_goes_to_the_subproblems_minimiser_from_any_first_step() -> None:
    q, pull = quadratics(4)[3], 0.9
    bent = Subproblem(torch.tensor(SLOPE), pull, torch.tensor(CENTRE))
    for lr in (1e-3, 0.2, 20.0):  # gradient descent of 20 runs away
        training = LocalTraining(
            solver="delta-sgd", lr=lr, solver_params="gamma=1 delta=1", steps=150, batch_size=0
        )
        w = solve(q.problem(), torch.tensor(START), bent, training, stream(1, "local")).w
        np.testing.assert_allclose(w, q.argmin(SLOPE, pull, CENTRE), atol=1e-9)


def test_a_solvers_batch_norm_is_updated_once_a_step() -> None:
    torch.manual_seed(2)
    module = Dropping()
    x = torch.randn(14, 3)
    problem = Problem(Border(module), cross_entropy, x, (x.sum(1) > 0).long())
    start = problem.model.vector
    training = LocalTraining(solver="delta-sgd", epochs=2, batch_size=4)
    info = solve(problem, start, Subproblem(), training, stream(1, "local"))
    w = info.w
    assert info.steps == 8
    assert int(module.norm.num_batches_tracked) == 8
    assert w.isfinite().all()
    assert all(map(torch.equal, module.masks[1::2], module.masks[2::2]))


def test_options_of_a_solver_travel_as_text() -> None:
    request = {"solver": "delta-sgd", "lr": 0.5, "solver-params": "gamma=1.5 amplify-first=true"}
    training = LocalTraining().updated(request)
    (group,) = make_optimizer(training, [nn.Parameter(torch.ones(1))]).param_groups
    assert (group["lr"], group["gamma"], group["amplify_first"]) == (0.5, 1.5, True)
    adam = LocalTraining(solver="adam", solver_params="eps=1e-3 amsgrad=true")
    (group,) = make_optimizer(adam, [nn.Parameter(torch.ones(1))]).param_groups
    assert (group["eps"], group["amsgrad"]) == (1e-3, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"solver_params": "gama=2"},
            r"no option 'gama' \(did you mean 'gamma'\?\); it has \['gamma', 'delta',",
        ),
        ({"solver_params": "lr=2"}, r"no option 'lr'"),
        ({"solver_params": "module=net"}, r"no option 'module'"),
        ({"solver_params": "gamma"}, "name=value, got 'gamma'"),
        ({"solver_params": "gamma=-1"}, "gamma must be > 0, got -1"),
        ({"solver_params": 2.0}, r"solver_params must be a text, got 2\.0"),
        ({"momentum": 0.9}, "solver 'delta-sgd' has no momentum"),
    ],
)
def test_a_bad_option_of_a_solver_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalTraining(solver="delta-sgd", **settings)


def test_a_run_config_takes_the_solver_with_its_options() -> None:
    config = RunConfig.parse(
        {"algorithm": "fedadmm", "solver": "delta-sgd", "solver-params": "delta=0.02"}
    )
    assert config.local()["solver-params"] == "delta=0.02"
    assert config.lr == 0.2  # eta_0 of the paper, on any data set
    with pytest.raises(ValueError, match="delta must be >= 0, got -1"):
        RunConfig.parse({"solver": "delta-sgd", "solver-params": "delta=-1"})


# ---- inside federated algorithms ------------------------------------------------------------

LOCAL = {"solver": "delta-sgd", "lr": 0.9, "epochs": 8, "batch-size": 0, "solver-params": "gamma=1"}
"""A first step of 0.9 is too long for gradient descent: curvatures go up to 2.5."""


@pytest.mark.slow
def test_fedadmm_goes_to_the_optimum_of_clients_that_differ() -> None:
    problems = quadratics(3)

    def distance(rounds: int, **local: Any) -> float:
        strategy = STRATEGIES["fedadmm"](rho=0.5, fraction_evaluate=0.0, local=LOCAL | local)
        with np.errstate(all="ignore"):
            return float(np.abs(train(strategy, grid(problems), rounds) - optimum(problems)).max())

    assert distance(80) < 1e-8
    assert distance(5, solver="gd", **{"solver-params": ""}) > 1e3


@pytest.mark.slow
def test_fedavg_goes_to_a_minimiser_that_all_clients_share() -> None:
    b = np.array([3.0, -1.0, 2.0, 0.5, -4.0])
    problems = shared_minimiser(quadratics(3), b)
    strategy = STRATEGIES["fedavg"](fraction_evaluate=0.0, local=LOCAL)
    np.testing.assert_allclose(train(strategy, grid(problems), 40), b, atol=1e-9)


PROBLEMS = quadratics(3)


def mean_reply(theta: np.ndarray) -> np.ndarray:
    """What the clients' replies average to, by the paper's algorithm on matrices."""
    sizes = np.array([q.n for q in PROBLEMS])
    replies = [
        by_hand(lambda w, k, q=q: q.gradient(w), theta, 4, eta=0.2, theta=1.0, delta=0.3)[0][-1]
        for q in PROBLEMS
    ]
    return sizes @ np.array(replies) / sizes.sum()


def adam(theta: np.ndarray, rounds: int) -> np.ndarray:
    m, v = np.zeros(DIM), np.zeros(DIM)
    for t in range(1, rounds + 1):
        change = mean_reply(theta) - theta
        m, v = 0.8 * m + 0.2 * change, 0.9 * v + 0.1 * change**2
        rate = 0.3 * math.sqrt(1 - 0.9 ** (t + 1)) / (1 - 0.8 ** (t + 1))
        theta = theta + rate * m / (np.sqrt(v) + 0.01)
    return theta


def yogi(theta: np.ndarray, rounds: int) -> np.ndarray:
    m, v = np.zeros(DIM), np.zeros(DIM)
    for _ in range(rounds):
        change = mean_reply(theta) - theta
        m = 0.8 * m + 0.2 * change
        v = v + np.where(v < change**2, 0.1, -0.1) * change**2
        theta = theta + 0.3 * m / (np.sqrt(v) + 0.01)
    return theta


def heavy_ball(theta: np.ndarray, rounds: int) -> np.ndarray:
    velocity = np.zeros(DIM)
    for _ in range(rounds):
        velocity = 0.6 * velocity + mean_reply(theta) - theta
        theta = theta + 0.7 * velocity
    return theta


ALL_THREE = {"min_train_nodes": 3, "min_available_nodes": 3, "fraction_evaluate": 0.0}
RATES = {"eta": 0.3, "beta_1": 0.8, "beta_2": 0.9, "tau": 0.01}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (lambda: FedAdam(**RATES, **ALL_THREE), adam),
        (lambda: FedYogi(**RATES, **ALL_THREE), yogi),
        (
            lambda: FedAvgM(server_learning_rate=0.7, server_momentum=0.6, **ALL_THREE),
            heavy_ball,
        ),
    ],
    ids=["FedAdam", "FedYogi", "FedAvgM"],
)
def test_flowers_server_optimizers_step_by_our_clients_replies(
    strategy: Callable[[], Any], expected: Callable[[np.ndarray, int], np.ndarray]
) -> None:
    config = ConfigRecord(
        {
            "solver": "delta-sgd",
            "lr": 0.2,
            "epochs": 4,
            "batch-size": 0,
            "solver-params": "delta=0.3",
        }
    )
    result = strategy().start(grid(PROBLEMS), to_record(START), num_rounds=3, train_config=config)
    np.testing.assert_allclose(to_vector(result.arrays), expected(START, 3), rtol=1e-9)
