"""FedNova: what steps add up to, where it is FedAvg, and whose optimum it comes to.

Mistakes these laws are written against: steps for their sum with momentum, a momentum's power off
by one, weights by clients for weights by samples, the mean of a without p, a division by tau.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from laws import RATE, START, local, quiet, train
from problems import Quadratic, grid, optimum, quadratics, to_record, to_vector

from fl_strategies import FedAvg, FedNova, FedProx, RoundInfo, fednova
from fl_strategies.solvers.gradient_weights import weight_of

strategy = partial(quiet, FedNova)


def added_up(steps: int, lr: float, momentum: float, nesterov: bool, mu: float) -> float:
    """How far, in units of lr, the steps go from theta = 0 on a gradient of 1 everywhere."""
    w = v = 0.0
    for _ in range(steps):
        v = momentum * v + 1.0 + mu * w
        w = w - lr * ((1.0 + mu * w) + momentum * v if nesterov else v)
    return -w / lr


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.6, "nesterov": True},
        {"momentum": 1.0},
        {"momentum": 1.0, "nesterov": True},
        {"mu": 0.7},
        {"mu": 0.7, "momentum": 0.9},
        {"mu": 0.7, "momentum": 0.6, "nesterov": True},
    ],
    ids=str,
)
def test_the_normalizer_is_what_the_steps_on_a_constant_gradient_add_up_to(
    steps: int, how: dict[str, Any]
) -> None:
    momentum, nesterov, mu = (how.get(n, 0.0) for n in ("momentum", "nesterov", "mu"))
    expected = added_up(steps, 0.1, momentum, bool(nesterov), mu)
    given = {name: value for name, value in how.items() if name != "mu"}
    found = weight_of(steps, pull=0.1 * mu, **given)
    np.testing.assert_allclose(found, expected, rtol=1e-13)


@pytest.mark.parametrize("pull", [1e-17, 1e-9, 1e-3])
def test_a_small_pull_takes_nothing_from_the_normalizer_but_its_part(pull: float) -> None:
    expected = sum(math.exp(k * math.log1p(-pull)) for k in range(10))
    assert weight_of(10, pull=pull) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}], ids=str
)
def test_with_equal_steps_it_is_fedavg_by_samples(settings: dict[str, Any]) -> None:
    problems = quadratics(4)
    plain = FedAvg(fraction_evaluate=0.0, local=local(**settings))
    expected = train(plain, grid(problems), 3)
    found = train(strategy(local=local(**settings)), grid(problems), 3)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}], ids=str)
def test_with_a_pull_and_equal_steps_it_is_fedprox(settings: dict[str, Any]) -> None:
    problems, how = quadratics(4), local(**settings)
    expected = train(FedProx(mu=0.5, fraction_evaluate=0.0, local=how), grid(problems), 3)
    found = train(strategy(mu=0.5, local=how), grid(problems), 3)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_a_round_is_equation_3_with_the_steps_that_each_client_took(mu: float) -> None:
    """Of 7, 9 and 11 samples in mini-batches of 3, two epochs have 6, 6 and 8 steps."""
    problems, seen = quadratics(3), list[RoundInfo]()
    settings = local(solver="sgd", epochs=2, **{"batch-size": 3})
    one = strategy(mu=mu, local=settings, callbacks=[seen.append])
    found = train(one, grid(problems), 1)
    a = np.array([seen[0].clients[i]["normalizer"] for i in range(3)])
    expected = [added_up(steps, RATE, 0.0, False, mu) for steps in (6, 6, 8)]
    np.testing.assert_allclose(a, expected, rtol=1e-12)
    p = np.array([7, 9, 11]) / 27
    each = [
        to_vector(
            FedProx(mu=mu, fraction_evaluate=0.0, local=settings, node_wait=0.01)
            .start(_alone(problems, i), to_record(START), 1)
            .arrays
        )
        for i in range(3)
    ]
    moved = sum(p[i] * (START - each[i]) / a[i] for i in range(3))
    np.testing.assert_allclose(found, START - (p @ a) * moved, rtol=1e-11)
    shares = [seen[0].clients[i]["weight-share"] for i in range(3)]
    np.testing.assert_allclose(shares, p / a / (p / a).sum(), rtol=1e-12)


def test_unequal_steps_leave_fedavg_biased_and_fednova_at_the_optimum() -> None:
    """As lr -> 0, by the pure rules, of clients that take 1, 4 and 9 steps of gradient descent."""
    problems, lr = quadratics(3), 2e-3
    clients = [(q.A, q.b, q.n, steps) for q, steps in zip(problems, (1, 4, 9), strict=True)]
    off = {}
    for name in ("fedavg", "fednova"):
        theta = START
        for _ in range(1200):
            uploads = []
            for A, b, n, steps in clients:
                w = theta
                for _ in range(steps):
                    w = w - lr * A @ (w - b)
                uploads.append((w, n, float(steps) if name == "fednova" else 1.0))
            theta = fednova.server_rule(theta, uploads)  # with equal a, FedAvg
        off[name] = np.abs(theta - optimum(problems, by_examples=True)).max()
    assert off["fednova"] < 0.03
    assert off["fedavg"] > 0.5


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        ({"mu": -1.0}, "mu must be >= 0, got -1"),
        ({"local": {"solver": "adam"}}, "solver must be one of.*what its steps add up to"),
        ({"local": {"extrapolation": 0.9}}, "extrapolation must be 0.0"),
    ],
)
def test_steps_whose_sum_is_not_known_are_refused(
    hyperparameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FedNova(**hyperparameters)


def _alone(problems: list[Quadratic], client: int) -> Any:
    """A federation in which the other clients are not connected."""
    federation = grid(problems)
    for number, node in enumerate(list(federation.contexts)):
        if number != client:
            del federation.contexts[node]
    return federation
