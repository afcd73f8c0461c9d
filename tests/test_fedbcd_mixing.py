"""How cloud servers mix: the paper's 1/B, matrices that change from round to round, bad ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from bcd import aspg, async_, both
from flwr.app import Message
from laws import START, STEPS, train
from problems import grid, quadratics, to_vector

from fl_strategies.bcd.mixing import matrix, mean, mix

RING = np.array([[0.5, 0.25, 0.0, 0.25], [0.25, 0.5, 0.25, 0.0], [0.0, 0.25, 0.5, 0.25],
                 [0.25, 0.0, 0.25, 0.5]])  # fmt: skip
ONE_WAY = np.array([[0.7, 0.3, 0.0], [0.0, 0.7, 0.3], [0.3, 0.0, 0.7]])


def one_over_b(server_round: int, ready: Sequence[int]) -> list[list[float]]:
    clouds = range(3)
    return [
        [1 / len(ready) if n in ready and m in ready else float(n == m) for m in clouds]
        for n in clouds
    ]


@both
@pytest.mark.parametrize(
    "options", [{}, {"first": 3, "repeats": 3}, {"rigorous": True, "staleness": 2}], ids=str
)
def test_the_default_is_one_over_b_to_the_bit(make: Any, options: dict[str, Any]) -> None:
    problems, options = quadratics(6), {"servers": 3, "fraction_train": 0.5, **options}
    plain = train(make(**options), grid(problems), 4)
    ways: list[Any] = [one_over_b]
    if options.get("first") == 3:
        ways.append([np.full((3, 3), 1 / 3)])
    for mixing in ways:
        np.testing.assert_array_equal(
            train(make(**options, mixing=mixing), grid(problems), 4), plain
        )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_papers_matrix_is_one_over_b(size: int) -> None:
    for ready in combinations(range(3), size):
        np.testing.assert_array_equal(matrix(None, 3, 1, ready), one_over_b(1, ready))


@pytest.mark.parametrize("servers", range(1, 30))
def test_equal_weights_are_the_mean_to_the_bit(servers: int) -> None:
    zs = [*np.random.default_rng(servers).normal(size=(servers, 50))]
    for weight in (1.0, 1.0 / servers, 0.3):
        np.testing.assert_array_equal(mix(zs, [weight] * servers), mean(zs))


@pytest.mark.parametrize("repeats", [1, 3])
def test_by_matrices_that_change_a_run_is_eq_6_step_by_step(repeats: int) -> None:
    """w_n = sum_m a_nm z_m in each of the K_z steps, then (6b) with all devices."""
    problems, eta, gamma = quadratics(6), 0.4, 0.6
    turns = [ONE_WAY, ONE_WAY.T @ ONE_WAY.T, np.eye(3)]
    one = async_(
        servers=3, first=3, repeats=repeats, eta_z=eta, gamma=gamma, reduce="sum",
        mixing=lambda number, ready: turns[number % 3],
    )  # fmt: skip
    train(one, grid(problems), 7)
    z, pairs = np.array([START] * 3), [(START, START)] * 6
    for t in range(1, 8):
        pairs = [
            aspg(q, *pairs[i], STEPS, zeta=0.9, gamma=gamma, z=z[i % 3])
            for i, q in enumerate(problems)
        ]
        x = np.array([x for x, _ in pairs])
        for _ in range(repeats):
            w = np.einsum("nm,md->nd", turns[t % 3], z)
            z = w - eta * gamma * sum(w - x[rows : rows + 3] for rows in (0, 3))
    for model, expected in zip(one.cloud_models, z, strict=True):
        np.testing.assert_allclose(to_vector(model), expected, rtol=1e-12)


@both
def test_matrices_are_used_in_turn_by_round(make: Any) -> None:
    problems, options = quadratics(4), {"servers": 4, "first": 4}
    turns = [RING, np.eye(4), RING @ RING]
    found = train(make(**options, mixing=np.array(turns)), grid(problems), 4)
    function = make(**options, mixing=lambda number, ready: turns[(number - 1) % 3])
    np.testing.assert_array_equal(found, train(function, grid(problems), 4))
    assert np.abs(found - train(make(**options, mixing=[RING]), grid(problems), 4)).max() > 1e-6


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_matrix_for_whichever_are_ready_is_doubly_stochastic(size: int) -> None:
    for ready in combinations(range(4), size):
        a = matrix([RING], 4, 1, ready)
        np.testing.assert_allclose(a.sum(axis=0), 1.0, rtol=1e-15)
        np.testing.assert_allclose(a.sum(axis=1), 1.0, rtol=1e-15)
        others = sorted({*range(4)} - {*ready})
        np.testing.assert_array_equal(a[others], np.eye(4)[others])
        for n, m in combinations(ready, 2):
            assert a[n, m] == RING[n, m]


BAD: list[tuple[Any, str]] = [
    ("ring", r"mixing must be function or sequence of matrices, got 'ring'"),
    (0.5, r"mixing must be function or sequence of matrices, got 0.5"),
    ([], r"mixing must be a function or matrices, got \[\]"),
    ([np.eye(2)], r"mixing\[0\] must be a matrix of shape \(3, 3\), got \(2, 2\)"),
    (np.eye(3), r"mixing\[0\] must be a matrix of shape \(3, 3\), got \(3,\)"),
    ([np.eye(3), "x"], r"mixing\[1\] must be a matrix of numbers, got 'x'"),
    ([np.eye(3), ONE_WAY], r"mixing\[1\] must be symmetric.* got 0.3 for cloud servers 0 and 1"),
    ([[[2, -1, 0], [-1, 2, 0], [0, 0, 1]]], r"mixing\[0\] must be >= 0, got -1 .* 0 and 1"),
    ([[[np.nan, 0, 0], [0, 1, 0], [0, 0, 1]]], r"must be >= 0, got nan for cloud servers 0 and 0"),
    ([np.eye(3) / 2], r"rows and columns must add up to 1, got 0.5 in row 0"),
    (lambda t, ready: [[1, 0, 0], [1, 0, 0], [0, 0, 1]], r"round 1: .* got 2 in column 0"),
    (lambda t, ready: np.full((3, 3), 1 / 3), r"round 1 must be 1 for cloud server 2 and itself"),
    (lambda t, ready: None, r"mixing of round 1 must be a matrix of shape \(3, 3\), got \(\)"),
]


@both
@pytest.mark.parametrize(("mixing", "message"), BAD, ids=[text for _, text in BAD])
def test_a_bad_matrix_is_refused_at_construction_with_bound_and_value(
    make: Any, mixing: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(servers=3, first=2, mixing=mixing)


def test_a_bad_matrix_of_a_later_round_ends_the_run_with_its_round() -> None:
    asked: list[int] = []

    def note(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "train":
            asked.append(request.content["config"]["server-round"])
        return reply

    one = async_(servers=2, first=2, mixing=lambda t, ready: np.eye(2) * (1 if t < 3 else 0.9))
    with pytest.raises(ValueError, match=r"mixing of round 3: .* got 0.9 in row 0"):
        train(one, grid(quadratics(2), fault=note), 5)
    assert max(asked) == 3
