"""Laws of the penalties on the global model."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from laws import START, TABLE, Row, local, train
from limits import pooled
from problems import Quadratic, grid, quadratics

from fl_strategies import FedADMM, FedDyn, FedSGD
from fl_strategies.parts import L1, L2, Box, Momentum, Regularizer

PENALTIES: list[Regularizer] = [L1(weight=0.8), L2(weight=0.7), Box(low=-0.5, high=1.5)]
every_penalty = pytest.mark.parametrize("part", PENALTIES, ids=lambda part: part.name)
ROW = {row.name: row for row in TABLE}


def penalty(part: Regularizer, v: np.ndarray) -> float:
    if isinstance(part, L1):
        return part.weight * float(np.abs(v).sum())
    if isinstance(part, L2):
        return part.weight / 2 * float(v @ v)
    assert isinstance(part, Box)
    return 0.0 if (v >= part.low).all() and (v <= part.high).all() else float("inf")


def kkt(part: Regularizer, problems: list[Quadratic], *, samples: bool = False) -> np.ndarray:
    """Return the minimiser of the mean loss plus g, number by number, until nothing moves."""
    weights = np.array([q.n if samples else 1.0 for q in problems])
    weights = weights / weights.sum()
    A = sum(p * q.A for p, q in zip(weights, problems, strict=True))
    b = sum(p * q.A @ q.b for p, q in zip(weights, problems, strict=True))
    v = np.zeros_like(START)
    for _ in range(4000):
        before = v.copy()
        for j in range(len(v)):
            rest = b[j] - A[j] @ v + A[j, j] * v[j]
            if isinstance(part, L1):
                v[j] = np.sign(rest) * max(abs(rest) - part.weight, 0.0) / A[j, j]
            elif isinstance(part, L2):
                v[j] = rest / (A[j, j] + part.weight)
            else:
                assert isinstance(part, Box)
                v[j] = min(max(rest / A[j, j], part.low), part.high)
        if (v == before).all():
            break
    return v


@every_penalty
def test_the_proximal_step_is_the_minimiser(part: Regularizer) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        a, rate = rng.normal(0.0, 2.0, 5), rng.uniform(0.1, 3.0)
        v = part.prox(a, rate)
        least = penalty(part, v) + (v - a) @ (v - a) / (2 * rate)
        for _ in range(50):
            w = v + rng.normal(0.0, 0.1, 5)
            assert penalty(part, w) + (w - a) @ (w - a) / (2 * rate) >= least


CASES = [*((part, 1.0) for part in PENALTIES), (L1(weight=2.5), 0.5)]


@pytest.mark.parametrize(("part", "fraction"), CASES, ids=str)
@pytest.mark.sampled("l1 weight=0.8-1.0")
def test_fedadmm_reaches_the_kkt_point_whoever_takes_part(
    part: Regularizer, fraction: float
) -> None:
    problems = [Quadratic(np.sqrt(3) * q.X, np.sqrt(3) * q.y) for q in quadratics(4)]
    strategy = FedADMM(
        rho=1.5,
        eta="fraction",
        fraction_train=fraction,
        regularizer=part,
        local=local(),
        fraction_evaluate=0.0,
    )
    found = train(strategy, grid(problems), 75 if fraction == 1.0 else 200)
    np.testing.assert_allclose(found, kkt(part, problems), atol=1e-6)


TAKING = [row for row in TABLE if row.strategy(local=local()).proximal_rate(1) is not None]


@pytest.mark.parametrize("row", TAKING, ids=str)
@pytest.mark.sampled
def test_algorithms_that_declare_a_proximal_rate_reach_the_kkt_point(row: Row) -> None:
    """Of the mean loss, or of the samples' where that is their own limit."""
    part = L1(weight=6.0)
    problems = [Quadratic(np.sqrt(3) * q.X, np.sqrt(3) * q.y) for q in quadratics(3)]
    strategy = row.strategy(local=local(), regularizer=part)
    found = train(strategy, grid(problems), min(row.rounds, 90))
    expected = kkt(part, problems, samples=row.limit is pooled)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert ((found == 0.0) == (np.abs(expected) < 1e-12)).all()  # some numbers are exactly 0
    assert (found == 0.0).any()


@cache
def of_feddyn(part: Regularizer | None) -> np.ndarray:
    return train(FedDyn(local=local(), regularizer=part), grid(quadratics(3)), 4)


@pytest.mark.parametrize(
    "part", [L1(weight=0.0), L2(weight=0.0), Box(low=-1e9, high=1e9)], ids=lambda part: part.name
)
def test_no_penalty_changes_no_bit(part: Regularizer) -> None:
    np.testing.assert_array_equal(of_feddyn(part), of_feddyn(None))


@pytest.mark.slow
def test_with_a_server_step_the_kkt_point_stays() -> None:
    part = Box(low=-0.5, high=1.5)
    problems = [Quadratic(np.sqrt(3) * q.X, np.sqrt(3) * q.y) for q in quadratics(3)]
    strategy = FedSGD(
        local=ROW["fedsgd"].local | {"lr": 0.1},
        regularizer=part,
        server_step=Momentum(lr=0.8, beta=0.2),
    )
    found = train(strategy, grid(problems), 90)
    np.testing.assert_allclose(found, kkt(part, problems, samples=True), atol=1e-6)


def test_a_rule_without_a_proximal_step_is_refused() -> None:
    part = L1()
    refused = [row.name for row in TABLE if row.strategy(local=local()).proximal_rate(1) is None]
    assert {"fedavg", "fedadmm", "scaffold", "fedbcd"} <= {*refused}
    for name in refused:
        text = rf"^regularizer={re.escape(repr(part))} does not go with .*use FedADMM with eta="
        with pytest.raises(ValueError, match=text):
            ROW[name].strategy(local=local(), regularizer=part)
    wrong: list[dict[str, Any]] = [{"tracking": "global"}, {"newcomer": "received"}]
    for options in wrong:
        with pytest.raises(ValueError, match="does not go with FedADMM"):
            FedADMM(eta="fraction", regularizer=part, **options)
    with pytest.raises(ValueError, match=r"low must be <= high \(1\), got 2"):
        Box(low=2.0, high=1.0)
