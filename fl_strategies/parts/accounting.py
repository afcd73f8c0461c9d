"""Accounting: the epsilon of rounds with Gaussian noise, by the package dp-accounting.

A round costs its Renyi divergences at ``ORDERS``, which add up over rounds and give epsilon.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fl_strategies.core.vectors import Vector

ORDERS = [*range(2, 65), 128, 256, 512]
"""The orders that are tried; whole ones are quick. Epsilon is an upper bound with any orders. With
dp-accounting's own it is 3.144 for 3.146 (Poisson, noise 1, q = 0.02, 500 rounds), and 21.05 for
23.00 (noise 0.5, q = 0.1, 30 rounds); delta is 1e-5."""


def package() -> Any:
    """Return dp-accounting, which takes a second; raise ``ImportError`` if it is not installed."""
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise ImportError(f"{error}: pip install dp-accounting") from None
    return dp_accounting


@functools.cache
def of_poisson(z: float, q: float) -> Vector:
    """Return the divergences of a round to which each client is drawn with probability ``q``.

    The noise is z times what one client more or less changes.
    """
    dp = package()
    event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z))
    return _divergences(event, dp.NeighboringRelation.ADD_OR_REMOVE_ONE)


@functools.cache
def of_fixed(z: float, size: int, of: int) -> Vector:
    """Return the divergences of a round to which ``size`` clients are drawn, ``of`` so many.

    The noise is z times what another client in the place of one changes.
    """
    dp = package()
    event = dp.SampledWithoutReplacementDpEvent(of, size, dp.GaussianDpEvent(z))
    return _divergences(event, dp.NeighboringRelation.REPLACE_ONE)


def epsilon(divergences: Vector, delta: float) -> float:
    """Return epsilon of rounds with these divergences in total."""
    if not np.isfinite(divergences).any():
        return float("inf")
    return float(package().rdp.compute_epsilon(ORDERS, divergences, delta)[0])


def _divergences(event: Any, relation: Any) -> Vector:
    return package().rdp.RdpAccountant(ORDERS, relation).compose(event).rdp
