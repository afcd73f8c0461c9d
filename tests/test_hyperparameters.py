"""Laws of the small parts: schedules, streams, subproblems, means."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fl_strategies import step_decay
from fl_strategies.core.randomness import stream
from fl_strategies.core.schedules import at, check
from fl_strategies.core.subproblem import Subproblem
from fl_strategies.core.vectors import weighted_mean

# ---- schedules ----------------------------------------------------------------------------------


def test_a_schedule_holds_from_each_first_round_on() -> None:
    schedule = {7: 0.3, 1: 2.0, 4: 1.1}  # in any order
    values = [2.0] * 3 + [1.1] * 3 + [0.3] * 5
    assert [at(schedule, t) for t in range(1, 12)] == values
    assert {at(0.4, t) for t in range(1, 12)} == {0.4}


def test_rates_fall_tenfold_at_half_and_at_three_quarters() -> None:
    for rounds in (1, 2, 3, 4, 5, 8, 100, 1000):
        schedule = step_decay(0.6, rounds)
        for t in range(1, rounds + 1):
            done = (t - 1) / rounds  # share of the rounds before this one
            expected = 0.6 / (100 if done >= 0.75 else 10 if done >= 0.5 else 1)
            assert at(schedule, t) == expected
    with pytest.raises(ValueError, match="rounds must be an integer >= 1, got 0"):
        step_decay(0.6, 0)


@pytest.mark.parametrize(
    ("hyperparameter", "bounds", "message"),
    [
        (0.0, {"above": 0.0}, r"rho must be > 0, got 0\.0"),
        (-0.1, {"low": 0.0}, r"rho must be >= 0, got -0\.1"),
        (2.5, {"above": 0.0, "high": 2.0}, r"rho must be > 0 and <= 2, got 2\.5"),
        (math.nan, {}, "rho must be a finite number, or a schedule .*, got nan"),
        (math.inf, {"above": 0.0}, "rho must be a finite number > 0, or a schedule .*, got inf"),
        (True, {}, "rho must be a finite number, or a schedule .*, got True"),
        ("1", {}, "rho must be a finite number, or a schedule .*, got '1'"),
        (1.0, {"low": 0.0, "below": 1.0}, r"rho must be >= 0 and < 1, got 1\.0"),
        ({1: 1.0, 5: -1.0}, {"low": 0.0}, r"rho must be >= 0, got -1\.0"),
        ({2: 1.0}, {}, r"rho: a schedule starts at round 1, got rounds \[2\]"),
        ({0: 1.0, 5: 0.1}, {}, r"rho: a schedule starts at round 1, got rounds \[0, 5\]"),
        ({1: 1.0, -1: 1.0}, {}, r"got rounds \[-1, 1\]"),
        ({}, {}, r"got rounds \[\]"),
    ],
)
def test_a_hyperparameter_outside_its_range_is_named_with_bound_and_value(
    hyperparameter: Any, bounds: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check("rho", hyperparameter, scheduled=True, **bounds)


def test_a_hyperparameter_on_its_closed_bounds_passes() -> None:
    for hyperparameter in (0, 2, 0.5, {1: 0.0, 3: 2.0}, np.float64(1.0)):
        check("rho", hyperparameter, low=0.0, high=2.0, scheduled=True)


# ---- random streams -----------------------------------------------------------------------------


def test_a_stream_depends_on_seed_purpose_and_indices_and_on_nothing_else() -> None:
    keys = [
        (s, p, t, c) for s in (0, 1) for p in ("sample", "local") for t in (1, 2) for c in (1, 2)
    ]
    first = {key: stream(*key).random(4).tolist() for key in keys}
    np.random.seed(1)  # noqa: NPY002
    again = {key: stream(*key).random(4).tolist() for key in reversed(keys)}
    assert first == again
    assert len({tuple(numbers) for numbers in first.values()}) == len(keys)


def test_node_ids_of_64_bits_have_streams_of_their_own() -> None:
    drawn = {stream(1, "local", 1, node).random() for node in (5, 2**32 + 5, 2**63 + 5)}
    assert len(drawn) == 3


def test_streams_have_no_negative_indices() -> None:
    for arguments in ((-1, "sample"), (1, "sample", 3, -2)):
        with pytest.raises(ValueError, match=r"seed and indices must be >= 0, got \(.*-"):
            stream(*arguments)


# ---- the subproblem and means -------------------------------------------------------------------


def test_the_subproblems_gradient_is_the_derivative_of_its_value() -> None:
    rng = np.random.default_rng(1)
    A, b, a, c, w = rng.normal(size=(4, 4)), *rng.normal(size=(4, 4))
    A = A @ A.T
    r = 0.7
    W = torch.tensor(w, requires_grad=True)
    tA, tb, ta, tc = map(torch.tensor, (A, b, a, c))
    value = 0.5 * (W - tb) @ tA @ (W - tb) + ta @ W + r / 2 * ((W - tc) ** 2).sum()
    value.backward()
    got = Subproblem(a, r, c).gradient(w, A @ (w - b))
    np.testing.assert_allclose(got, W.grad, rtol=1e-12)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_a_weighted_mean_is_the_matrix_product_with_the_shares(kind: Any) -> None:
    rng = np.random.default_rng(2)
    vectors, weights = rng.normal(size=(5, 3)), rng.uniform(0.1, 9.0, 5)
    pairs = [(kind(v), float(p)) for v, p in zip(vectors, weights, strict=True)]
    before = vectors.copy()
    got = weighted_mean(iter(pairs))
    np.testing.assert_allclose(got, weights @ vectors / weights.sum(), rtol=1e-13)
    np.testing.assert_array_equal([np.asarray(v) for v, _ in pairs], before)
    np.testing.assert_allclose(weighted_mean(iter(pairs[::-1])), got, rtol=1e-13)


def test_a_mean_of_no_vectors_is_refused() -> None:
    for pairs in ([], [(np.ones(3), 0.0)]):
        with pytest.raises(ValueError, match="at least one vector with a positive weight"):
            weighted_mean(pairs)
