"""How long rounds take in FedBCD's experiments, and the gain of waiting less.

A device's request arrives after Exp(mean 2), and each epoch takes it Exp(mean 1), so that device i
of round t takes (``fl_strategies.parts.exponential``)

    tau_i = arrival_i + K_i work_i                                              (1)

A cloud server is done when its active devices are, tau_n = max_i tau_i; the active ones are those
whose requests arrive first. Of N cloud servers the first B are done at the order statistic
tau_(B), all of them at tau_(N), so that waiting for B in place of N changes a round's length by

    r_{B,N} = E tau_(B) / E tau_(N)                                             (2)
            <~ Q(beta) / Q(1 - 1/N)   for B = beta N and large N                (3)

Q       quantile function of tau_n; the tau_n are independent and identically distributed
<~      (3) nears (2) as N grows. It is above (2) for exponential times, not for every Q: with
        Q(u) = (-ln(1 - u))^(10/3), B = 1 and N = 10 have (3) = 0.54 of (2)

Reference: Wu, Scaglione, Wai, Karakoc, Hreinsson, Ma, "Federated Block Coordinate Descent Scheme
for Learning Global and Personalized Models", AAAI 2021, eqs. 7-8 and Section 5.2, footnote 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fl_strategies.core.schedules import check

Quantile: TypeAlias = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""``Q(u)``: the time [seconds] by which a share u in (0, 1) of the cloud servers is done."""


def mean_order_statistic(quantile: Quantile, k: int, n: int) -> float:
    """Return E tau_(k), the mean of the k-th smallest of ``n`` independent times.

    It is the integral of Q(u) over u ~ Beta(k, n - k + 1), by tanh-sinh quadrature. Raises
    ``ValueError`` unless 1 <= k <= n.
    """
    check("k", k, low=1, high=n)
    t = np.linspace(-3.0, 3.0, 2001)
    # u = 1/(1 + exp(-pi sinh t)): the nodes crowd where Q may be infinite
    low, high = (-np.log1p(np.exp(sign * np.pi * np.sinh(t))) for sign in (-1.0, 1.0))
    scale = math.lgamma(n + 1) - math.lgamma(k) - math.lgamma(n - k + 1)
    # dt: u' = pi cosh(t) u (1 - u), which raises both exponents of the density by one
    weights = np.exp(scale + k * low + (n - k + 1) * high) * np.pi * np.cosh(t)
    u = np.minimum(np.exp(low), 1.0 - 2.0**-53)
    return float(np.sum(weights * quantile(u)) * (t[1] - t[0]))


def latency_gain(quantile: Quantile, first: int, servers: int) -> float:
    """Return r_{B,N} of (2) for B = ``first`` of N = ``servers``; below 1 is faster."""
    last = mean_order_statistic(quantile, servers, servers)
    return mean_order_statistic(quantile, first, servers) / last


def large_latency_gain(quantile: Quantile, share: float, servers: int) -> float:
    """Return (3) for beta = ``share`` in (0, 1) and N = ``servers`` >= 2."""
    check("servers", servers, low=2)
    if not 0.0 < share < 1.0:
        raise ValueError(f"share must be > 0 and < 1, got {share}")
    at = quantile(np.array([share, 1.0 - 1.0 / servers]))
    return float(at[0] / at[1])


def exponential_quantile(u: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return Q(u) of an exponential time of mean 1; the mean cancels in (2) and (3)."""
    return -np.log1p(-u)
