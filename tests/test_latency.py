"""Latency: FedBCD's eqs. 7-8 against Monte Carlo and closed forms; the clock."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fl_strategies.bcd.latency import (
    Quantile,
    exponential_quantile,
    large_latency_gain,
    latency_gain,
    mean_order_statistic,
)
from fl_strategies.parts import Exponential


def simulated(first: int, servers: int, rounds: int = 20_000) -> tuple[float, float]:
    """Return r_{B,N} of exponential times by Monte Carlo, and the standard error of it."""
    times = np.random.default_rng(1).exponential(size=(rounds, servers))
    ordered = np.partition(times, [first - 1, servers - 1], axis=1)
    early, late = ordered[:, first - 1], ordered[:, servers - 1]
    ratio = early.mean() / late.mean()
    error = np.std(early - ratio * late) / late.mean() / math.sqrt(rounds)
    return float(ratio), float(error)


@pytest.mark.parametrize(("first", "servers"), [(1, 10), (3, 10), (5, 10), (10, 10), (7, 40)])
def test_the_gain_is_that_of_simulated_rounds(first: int, servers: int) -> None:
    ratio, error = simulated(first, servers)
    gain = latency_gain(exponential_quantile, first, servers)
    assert gain == pytest.approx(ratio, abs=4 * error + 1e-9)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 7), (4, 7), (7, 7), (60, 100), (1000, 1000)])
def test_order_statistics_of_exponential_times_are_harmonic_sums(k: int, n: int) -> None:
    expected = sum(1 / j for j in range(n - k + 1, n + 1))
    assert mean_order_statistic(exponential_quantile, k, n) == pytest.approx(expected, rel=1e-9)


def test_order_statistics_of_uniform_times_divide_the_interval_evenly() -> None:
    for k in range(1, 8):
        assert mean_order_statistic(lambda u: u, k, 7) == pytest.approx(k / 8, rel=1e-9)


def excess(first: int, servers: int, quantile: Quantile = exponential_quantile) -> float:
    """By which share (3) is above (2); below 0 where it is under."""
    exact = latency_gain(quantile, first, servers)
    return large_latency_gain(quantile, first / servers, servers) / exact - 1.0


def test_the_large_form_grows_tight() -> None:
    found = [excess(3 * servers // 10, servers) for servers in (10, 100, 1000, 10_000)]
    assert found == sorted(found, reverse=True)
    assert 0.0 < found[-1] < 0.1


@pytest.mark.parametrize("servers", [10, 40, 200])
def test_the_large_form_is_an_upper_bound_for_exponential_times(servers: int) -> None:
    """H_N > ln N, and H_N - H_(N-B) < ln(N/(N - B)), for every B < N."""
    assert all(excess(first, servers) > 0.0 for first in range(1, servers))


def test_the_large_form_is_no_upper_bound_for_every_quantile_function() -> None:
    """The first of ten times with a heavy tail is on average above their quantile of a tenth."""
    heavy = excess(1, 10, lambda u: (-np.log1p(-u)) ** (10 / 3))
    assert heavy == pytest.approx(0.54 - 1.0, abs=0.01)


def test_times_that_are_bounded_gain_at_most_the_share_of_the_bound() -> None:
    """The paper's remark: for times within [0, T] the gain saturates at Q(beta)/T."""
    assert latency_gain(lambda u: u, 3000, 10_000) == pytest.approx(0.3, rel=1e-3)


def test_the_clocks_times_have_the_means_it_is_given() -> None:
    clock = Exponential(mean_arrival=3.0, mean_work=0.5)
    draws = 4000
    arrivals = np.array([clock.begins(1, 1, i) for i in range(draws)])
    each = np.array([clock.seconds(1, 1, i, 4.0) for i in range(draws)]) - arrivals
    for values, mean in ((arrivals, 3.0), (each, 4.0 * 0.5)):
        assert values.mean() == pytest.approx(mean, abs=4 * mean / math.sqrt(draws))
        assert values.std() == pytest.approx(mean, rel=0.15)  # as an exponential time has it
    assert abs(np.corrcoef(arrivals, each)[0, 1]) < 4 / math.sqrt(draws)


def test_the_clock_goes_by_seed_round_and_client_alone() -> None:
    clock = Exponential()
    drawn = {
        (seed, t, i): clock.seconds(seed, t, i, 2.0)
        for i in (3, 1)
        for t in (2, 5)
        for seed in (0, 1)
    }
    assert len(set(drawn.values())) == 8
    for (seed, t, i), value in drawn.items():
        assert clock.seconds(seed, t, i, 2.0) == value


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_order_statistic(exponential_quantile, 0, 3), "k must be >= 1 and <= 3"),
        (lambda: latency_gain(exponential_quantile, 4, 3), "k must be >= 1 and <= 3, got 4"),
        (lambda: large_latency_gain(exponential_quantile, 1.0, 9), "share must be > 0 and < 1"),
        (lambda: large_latency_gain(exponential_quantile, 0.5, 1), "servers must be >= 2, got 1"),
        (
            lambda: Exponential(mean_arrival=-1.0),
            r"mean_arrival must be >= 0 and <= 1e\+09, got -1.0",
        ),
    ],
)
def test_bad_arguments_are_refused_with_bound_and_value(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
