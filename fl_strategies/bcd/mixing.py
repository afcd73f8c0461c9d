"""How cloud servers mix their models: w_n = sum_m a_nm z_m, with the weights of a matrix A [V, V].

By the paper's Assumption 3, A is doubly stochastic: no entry is negative, and rows and columns add
up to 1. Only ready cloud servers mix: the row of another one is the identity's, and so its column.

Reference: Wu et al., "Federated Block Coordinate Descent Scheme for Learning Global and
Personalized Models", AAAI 2021, eq. 6a and Assumption 3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fl_strategies.core.schedules import require, shown
from fl_strategies.core.vectors import Vector

Matrix: TypeAlias = npt.NDArray[np.float64]
Mixing: TypeAlias = Callable[[int, Sequence[int]], Any] | Sequence[Any]
"""A function of the round and the ready cloud servers that returns A, or a sequence of matrices."""

ROUNDING = 1e-6
"""How far from 1 sums may be."""


def is_mixing(value: object) -> bool:
    """Whether ``value`` is a function, or a sequence or array of matrices."""
    matrices = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
    return matrices or (callable(value) and not isinstance(value, type))


def mean(zs: Sequence[Vector]) -> Vector:
    """Return the mean of the cloud servers' models."""
    return sum(zs[1:], zs[0]) / len(zs)


def mix(zs: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Return the mean of ``zs`` by ``weights`` >= 0; equal ones give to the bit the plain mean."""
    largest = max(weights)
    shares = {m: weight / largest for m, weight in enumerate(weights) if weight > 0.0}
    first, *others = (share * zs[m] for m, share in shares.items())
    return sum(others, first) / sum(shares.values())


def uniform(servers: int, ready: Collection[int]) -> Matrix:
    """Return the paper's A: 1/B among the B ready cloud servers."""
    weights = np.eye(servers)
    weights[np.ix_([*ready], [*ready])] = 1.0 / len(ready)
    return weights


def matrix(mixing: Mixing | None, servers: int, number: int, ready: Sequence[int]) -> Matrix:
    """Return A [V, V] of round ``number``; raise ``ValueError`` if it breaks Assumption 3."""
    if mixing is None:
        return uniform(servers, ready)
    if callable(mixing):
        return checked(mixing(number, tuple(ready)), servers, ready, f"mixing of round {number}")
    every = np.array(mixing[(number - 1) % len(mixing)], float)
    weights, others = np.eye(servers), sorted({*range(servers)} - {*ready})
    weights[np.ix_(ready, ready)] = every[np.ix_(ready, ready)]
    for n in ready:  # what it would take of those that are not ready, it takes of itself
        weights[n, n] += every[n, others].sum()
    return weights


def check_mixing(mixing: Mixing | None, servers: int, first: int) -> None:
    """Raise ``ValueError`` for a ``mixing`` that cannot be used, as far as that is known before."""
    if mixing is None:
        return
    if callable(mixing):
        matrix(mixing, servers, 1, range(first))
        return
    require(len(mixing) > 0, "mixing", "a function or matrices", mixing)
    for place, each in enumerate(mixing):
        name = f"mixing[{place}]"
        weights = checked(each, servers, range(servers), name)
        apart = np.abs(weights - weights.T)
        n, m = np.unravel_index(np.argmax(apart), apart.shape)
        if apart[n, m] > ROUNDING:
            raise ValueError(
                f"{name} must be symmetric, so that it fits whichever cloud servers are ready, got"
                f" {weights[n, m]:g} for cloud servers {n} and {m} and {weights[m, n]:g} for {m}"
                f" and {n}; a function may return others"
            )


def checked(weights: Any, servers: int, ready: Collection[int], name: str) -> Matrix:
    """Return ``weights`` as A; raise ``ValueError``, which calls it ``name``, if it is none."""
    try:
        a = np.array(weights, float)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a matrix of numbers, got {shown(weights)}") from None
    shape = (servers, servers)
    require(a.shape == shape, name, f"a matrix of shape {shape}", a.shape)
    n, m = np.unravel_index(np.argmin(a), shape)
    if not a[n, m] >= 0.0:
        raise ValueError(f"{name} must be >= 0, got {a[n, m]:g} for cloud servers {n} and {m}")
    for axis, line in ((1, "row"), (0, "column")):
        sums = a.sum(axis)
        n = np.argmax(np.abs(sums - 1.0))
        if not abs(sums[n] - 1.0) <= ROUNDING:
            raise ValueError(
                f"{name}: rows and columns must add up to 1, got {sums[n]:g} in {line} {n}"
            )
    for n in sorted({*range(servers)} - {*ready}):
        if not a[n, n] >= 1.0 - ROUNDING:
            raise ValueError(
                f"{name} must be 1 for cloud server {n} and itself, which is not ready, got"
                f" {a[n, n]:g}"
            )
    return a
