"""Sums of clients' vectors in float64, in one pass over the received arrays.

An upload arrives as arrays of the model's type. Its vector [d] consists of these arrays in place,
and is converted to float64 only if a rule needs that; sums go block by block through the cache.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

Vector: TypeAlias = Any
"""``numpy.ndarray`` or ``torch.Tensor``, ``[d]`` or ``[clients, d]``."""
Number: TypeAlias = Any
"""A number of one client; of a stack one for all clients, or a column ``[clients, 1]``."""

BLOCK = 1 << 16
"""Numbers in a block: two blocks of float64 fit into a core's cache of 1 MB."""
AT_ONCE = 32
"""Vectors of a sum that are in memory at a time."""
MANY = 1 << 20
"""Threads share the work on at least so many numbers."""
THREADS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


class Pieces(NDArrayOperatorsMixin):
    """A vector [d] made of the received arrays; NumPy treats it as one array in float64."""

    def __init__(self, pieces: Sequence[npt.NDArray[Any]]) -> None:
        self.pieces = [np.ravel(piece) for piece in pieces]

    @property
    def shape(self) -> tuple[int]:
        """(d,)"""
        return (sum(len(piece) for piece in self.pieces),)

    ndim = 1

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        return self.__array__()[key]

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the array in float64: ``sum``, ``copy``, ``dtype`` ..."""
        if name.startswith("_") or name == "pieces":
            raise AttributeError(name)
        return getattr(self.__array__(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.concatenate(self.pieces, dtype=dtype or np.float64)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [v.__array__() if isinstance(v, Pieces) else v for v in inputs]
        return getattr(ufunc, method)(*plain, **options)


def weighted_sum(weighted: Iterable[tuple[Vector, Number]]) -> tuple[Vector, Number]:
    """Return sum_i weight_i v_i and sum_i weight_i over ``(v_i, weight_i)``, in their order.

    NumPy vectors are summed in float64. Without any vector both sums are 0.

    Examples
    --------
    >>> weighted_sum([(np.ones(2), 1.0), (np.zeros(2), 3.0)])
    (array([1., 1.]), 4.0)
    """
    pairs = iter(weighted)
    total: Vector = 0.0
    weights: Number = 0.0
    while some := list(islice(pairs, AT_ONCE)):
        weights = sum((weight for _, weight in some), weights)
        if _long(some):
            total = _in_blocks(some, total)
        else:
            for vector, weight in some:
                total = total + weight * vector
    return total, weights


def weighted_mean(weighted: Iterable[tuple[Vector, Number]]) -> Vector:
    """Return sum_i weight_i v_i / sum_i weight_i over ``(v_i, weight_i)``.

    Equal weights of long vectors count as 1 each, which is faster. Raises ``ValueError`` when there
    is nothing to average or the weights sum to zero.
    """
    pairs = iter(weighted)
    first = list(islice(pairs, AT_ONCE + 1))
    if first and _long(first):
        alike = first[0][1] and all(weight == first[0][1] for _, weight in first)
        unit = first[0][1] if alike else 1.0
        first = [(vector, weight / unit) for vector, weight in first]
        pairs = ((vector, weight / unit) for vector, weight in pairs)
        weights = sum((weight for _, weight in first), 0.0)
        if len(first) <= AT_ONCE and weights != 0.0:
            return _in_blocks(first, divisor=weights)
    total, weights = weighted_sum(chain(first, pairs))
    if isinstance(weights, float) and weights == 0.0:
        raise ValueError("a mean needs at least one vector with a positive weight")
    return total / weights


def _long(pairs: Sequence[tuple[Vector, Number]]) -> bool:
    """Whether these are NumPy vectors, long enough to fill blocks, with numbers for weights."""
    return all(
        isinstance(v, np.ndarray | Pieces) and v.ndim == 1 and np.ndim(w) == 0 for v, w in pairs
    ) and (len(pairs[0][0]) >= BLOCK)


def _in_blocks(
    pairs: Sequence[tuple[Vector, float]], before: Vector = 0.0, divisor: float = 1.0
) -> npt.NDArray[np.float64]:
    """Return the sum of ``before`` and the weighted vectors, divided by ``divisor``."""
    total = np.empty(len(pairs[0][0]))
    tasks = []
    for begin, group in _aligned(pairs):
        size = len(group[0][0])
        for start in range(0, size, BLOCK):
            stop = min(start + BLOCK, size)
            parts = [(vector[start:stop], weight) for vector, weight in group]
            tasks.append((slice(begin + start, begin + stop), parts))

    def add(tasks: Iterable[tuple[slice, list[tuple[npt.NDArray[Any], float]]]]) -> None:
        scaled = np.empty(BLOCK)
        for place, parts in tasks:
            block = total[place]
            product = scaled[: len(block)]
            added = isinstance(before, np.ndarray)
            if added:
                np.copyto(block, before[place])
            for part, weight in parts:
                if weight != 1.0:  # a separate cast is faster than one inside a product
                    np.copyto(product, part)
                    part = np.multiply(product, weight, out=product)
                if added:
                    np.add(block, part, out=block)
                else:
                    np.copyto(block, part)
                    added = True
            if divisor != 1.0:
                np.divide(block, divisor, out=block)

    _shared_out(add, tasks, len(total) * len(pairs))
    return total


def _aligned(
    pairs: Sequence[tuple[Vector, float]],
) -> Iterator[tuple[int, list[tuple[npt.NDArray[Any], float]]]]:
    """Yield the pieces of all vectors that cover the same numbers, and where they begin."""
    sizes = next(([len(p) for p in v.pieces] for v, _ in pairs if isinstance(v, Pieces)), None)
    begin = 0
    for number, size in enumerate(sizes or [len(pairs[0][0])]):
        yield (
            begin,
            [
                (v.pieces[number] if isinstance(v, Pieces) else v[begin : begin + size], w)
                for v, w in pairs
            ],
        )
        begin += size


def finite(arrays: Iterable[npt.NDArray[Any]]) -> bool:
    """Return whether all numbers of all ``arrays`` are finite."""
    flat = [a.reshape(-1) for a in arrays if a.dtype.kind == "f"]
    results: list[bool] = []
    with np.errstate(over="ignore", invalid="ignore"):
        _shared_out(
            lambda blocks: results.extend(map(_finite, blocks)),
            [a[start : start + MANY] for a in flat for start in range(0, len(a), MANY)],
            sum(map(len, flat)),
        )
    return all(results)


def cast(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return ``array`` as ``dtype``; itself, if that is its type."""
    if array.dtype == dtype or array.size < MANY or not array.flags.c_contiguous:
        return np.asarray(array, dtype=dtype)
    new = np.empty(array.shape, dtype)
    source, target = array.reshape(-1), new.reshape(-1)

    def copy(starts: Iterable[int]) -> None:
        for start in starts:
            target[start : start + BLOCK] = source[start : start + BLOCK]

    _shared_out(copy, range(0, len(source), BLOCK), len(source))
    return new


def _finite(array: npt.NDArray[Any]) -> bool:
    # a finite sum of squares has finite parts only; that of finite parts may overflow
    return math.isfinite(array.dot(array)) or bool(np.isfinite(array).all())


def _shared_out(work: Callable[[Iterable[Any]], None], tasks: Sequence[Any], numbers: int) -> None:
    """Do ``work`` on the tasks, by threads if there are enough ``numbers``.

    Each thread, the calling one among them, takes the next task when it has finished one.
    """
    left = iter(tasks)
    if numbers < MANY or THREADS == 1:
        work(left)
        return
    settings = np.geterr()

    def quietly() -> None:
        with np.errstate(**settings):  # which threads do not take over
            work(left)

    others = [_pool().submit(quietly) for _ in range(THREADS - 1)]
    try:
        work(left)
    finally:
        wait(others)
    for other in others:
        other.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS - 1, "fl-strategies-sum")


if hasattr(os, "register_at_fork"):  # a forked process has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
