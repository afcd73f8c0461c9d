"""Latency: FedBCD's eqs. 7-8 and the Weibull case against Monte Carlo; the clock."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fl_strategies.bcd.latency import (
    Clock,
    large_latency_gain,
    latency_gain,
    mean_order_statistic,
    weibull_latency_gain,
    weibull_quantile,
)


def simulated(shape: float, first: int, servers: int, rounds: int = 20_000) -> tuple[float, float]:
    """Return r_{B,N} of Weibull times by Monte Carlo, and the standard error of it."""
    times = np.random.default_rng(1).weibull(shape, (rounds, servers))
    ordered = np.partition(times, [first - 1, servers - 1], axis=1)
    early, late = ordered[:, first - 1], ordered[:, servers - 1]
    ratio = early.mean() / late.mean()
    error = np.std(early - ratio * late) / late.mean() / math.sqrt(rounds)
    return float(ratio), float(error)


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.5])
@pytest.mark.parametrize(("first", "servers"), [(1, 10), (3, 10), (5, 10), (10, 10), (7, 40)])
def test_the_gain_is_that_of_simulated_rounds(shape: float, first: int, servers: int) -> None:
    ratio, error = simulated(shape, first, servers)
    assert latency_gain(weibull_quantile(shape), first, servers) == pytest.approx(
        ratio, abs=4 * error + 1e-9
    )


@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 7), (4, 7), (7, 7), (60, 100), (1000, 1000)])
def test_order_statistics_of_exponential_times_are_harmonic_sums(k: int, n: int) -> None:
    expected = sum(1 / j for j in range(n - k + 1, n + 1))
    assert mean_order_statistic(weibull_quantile(1.0), k, n) == pytest.approx(expected, rel=1e-9)


def test_order_statistics_of_uniform_times_divide_the_interval_evenly() -> None:
    for k in range(1, 8):
        assert mean_order_statistic(lambda u: u, k, 7) == pytest.approx(k / 8, rel=1e-9)


def test_a_weibull_times_order_statistics_grow_with_its_scale() -> None:
    one, three = (mean_order_statistic(weibull_quantile(2.0, scale), 2, 5) for scale in (1.0, 3.0))
    assert three == pytest.approx(3.0 * one, rel=1e-12)


def excess(shape: float, share: float, servers: int) -> float:
    """By which share (3) is above (2) for Weibull times, below 0 where it is under."""
    quantile = weibull_quantile(shape, scale=3.0)
    exact = latency_gain(quantile, round(share * servers), servers)
    return large_latency_gain(quantile, share, servers) / exact - 1.0


@pytest.mark.parametrize("shape", [0.8, 1.0, 2.0])
def test_the_large_form_grows_tight(shape: float) -> None:
    found = [excess(shape, 0.3, servers) for servers in (10, 100, 1000, 10_000)]
    assert found == sorted(found, reverse=True)
    assert 0.0 < found[-1] < 0.1


@pytest.mark.parametrize("servers", [10, 40, 200])
def test_the_large_form_is_an_upper_bound_for_exponential_times(servers: int) -> None:
    """H_N > ln N, and H_N - H_(N-B) < ln(N/(N - B)), for every B < N."""
    assert all(excess(1.0, first / servers, servers) > 0.0 for first in range(1, servers))


def test_the_large_form_is_no_upper_bound_for_every_weibull_shape() -> None:
    """The first of ten times of shape 0.3 is on average above their quantile of a tenth."""
    assert excess(0.3, 0.1, 10) == pytest.approx(0.54 - 1.0, abs=0.01)
    ratio, error = simulated(0.3, 1, 10)
    assert ratio - 4 * error > weibull_latency_gain(0.3, 0.1, 10)


def test_the_large_form_agrees_with_simulated_rounds() -> None:
    ratio, error = simulated(2.0, 500, 1000, rounds=2000)
    assert ratio - 4 * error < weibull_latency_gain(2.0, 0.5, 1000) < 1.06 * ratio


@pytest.mark.parametrize("shape", [0.5, 1.0, 3.0])
def test_the_weibull_case_is_the_large_form_whatever_the_scale(shape: float) -> None:
    for share, servers in ((0.3, 10), (0.5, 200)):
        assert weibull_latency_gain(shape, share, servers) == pytest.approx(
            large_latency_gain(weibull_quantile(shape, scale=7.0), share, servers), rel=1e-12
        )


def test_times_that_are_bounded_gain_at_most_the_share_of_the_bound() -> None:
    """The paper's remark: for times within [0, T] the gain saturates at Q(beta)/T."""
    assert latency_gain(lambda u: u, 3000, 10_000) == pytest.approx(0.3, rel=1e-3)


def test_the_clocks_times_have_the_means_it_is_given() -> None:
    clock = Clock(mean_arrival=3.0, mean_work=0.5)
    draws = 4000
    arrivals = np.array([clock.arrival(1, 1, i) for i in range(draws)])
    each = np.array([clock.latency(1, 1, i, 4.0) for i in range(draws)]) - arrivals
    for values, mean in ((arrivals, 3.0), (each, 4.0 * 0.5)):
        assert values.mean() == pytest.approx(mean, abs=4 * mean / math.sqrt(draws))
        assert values.std() == pytest.approx(mean, rel=0.15)  # as an exponential time has it
    assert abs(np.corrcoef(arrivals, each)[0, 1]) < 4 / math.sqrt(draws)


def test_the_clock_goes_by_seed_round_and_client_alone() -> None:
    clock = Clock()
    drawn = {
        (seed, t, i): clock.latency(seed, t, i, 2.0)
        for i in (3, 1)
        for t in (2, 5)
        for seed in (0, 1)
    }
    assert len(set(drawn.values())) == 8
    for (seed, t, i), value in drawn.items():
        assert clock.latency(seed, t, i, 2.0) == value


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_order_statistic(weibull_quantile(1.0), 0, 3), "k must be >= 1 and <= 3"),
        (lambda: latency_gain(weibull_quantile(1.0), 4, 3), "k must be >= 1 and <= 3, got 4"),
        (lambda: large_latency_gain(weibull_quantile(1.0), 1.0, 9), "share must be > 0 and < 1"),
        (lambda: weibull_latency_gain(1.0, 0.5, 1), "servers must be >= 2, got 1"),
        (lambda: weibull_latency_gain(0.0, 0.5, 9), "shape must be > 0, got 0.0"),
        (lambda: weibull_quantile(1.0, -1.0), "scale must be > 0, got -1.0"),
        (lambda: Clock(mean_arrival=-1.0), "mean_arrival must be >= 0, got -1.0"),
    ],
)
def test_bad_arguments_are_refused_with_bound_and_value(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
