"""Sums of clients' vectors: block by block, by threads or not, the same numbers to the bit.

Mistakes these laws are written against: blocks that overlap or leave a gap, pieces that are not
aligned, a weight dropped, float32 sums, a second batch of vectors that forgets the first.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from fl_strategies.core import vectors
from fl_strategies.core.vectors import Pieces, finite, weighted_mean, weighted_sum

SIZES = [(3, 5), (40_000, 1, 70_001), (vectors.MANY // 2, vectors.BLOCK, 7)]


def uploads(sizes: tuple[int, ...], clients: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [[rng.normal(size=n).astype(np.float32) for n in sizes] for _ in range(clients)]


@pytest.mark.parametrize(
    ("clients", "sizes"),
    [*product([1, 3], SIZES), *product([vectors.AT_ONCE + 2], SIZES[:2])],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_weighted_mean_is_the_sum_in_order_in_float64(
    clients: int, sizes: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "THREADS", threads)
    arrays = uploads(sizes, clients)
    weights = [n + 1.0 if n % 2 else 1.0 for n in range(clients)]
    expected = 0.0
    for pieces, weight in zip(arrays, weights, strict=True):
        expected = expected + weight * np.concatenate(pieces, dtype=np.float64)
    pairs = [(Pieces(p), w) for p, w in zip(arrays, weights, strict=True)]
    total, weight = weighted_sum(pairs)
    assert np.array_equal(total, expected)
    assert weight == sum(weights)
    assert np.array_equal(weighted_mean(pairs), expected / sum(weights))
    whole = [(np.asarray(v), w) for v, w in pairs]
    mixed = [whole[n] if n % 2 else pair for n, pair in enumerate(pairs)]
    assert np.array_equal(weighted_mean(iter(mixed)), expected / sum(weights))


def test_a_vector_in_pieces_is_an_array_to_numpy() -> None:
    pieces = uploads((3, 5), 1)[0]
    whole, plain = Pieces(pieces), np.concatenate(pieces, dtype=np.float64)
    assert (len(whole), whole.shape, whole.ndim) == (8, (8,), 1)
    for found, expected in (
        (whole + plain, 2 * plain),
        (plain - whole, 0 * plain),
        (2.0 * whole, 2 * plain),
        (whole @ whole, plain @ plain),
        (whole[2:6], plain[2:6]),
        (np.asarray(whole), plain),
    ):
        np.testing.assert_array_equal(found, expected)
        assert np.asarray(found).dtype == np.float64


@pytest.mark.parametrize("size", [3, vectors.MANY + 3])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(size: int, wrong: float) -> None:
    array = np.full(size, 3e38, np.float32)  # whose sum overflows
    assert finite([array])
    for place in (0, size // 2, size - 1):
        bad = array.copy()
        bad[place] = wrong
        assert not finite([bad])
    assert finite([np.arange(3)])


def test_a_vector_in_pieces_has_what_an_array_has() -> None:
    pieces = uploads((3, 5), 1)[0]
    whole, plain = Pieces(pieces), np.concatenate(pieces, dtype=np.float64)
    assert whole.sum() == plain.sum()
    assert whole.dtype == np.float64
    np.testing.assert_array_equal(whole.copy(), plain)
    with pytest.raises(AttributeError):
        whole.nothing_of_the_kind  # noqa: B018
    np.testing.assert_array_equal(copy.deepcopy(whole), plain)


@pytest.mark.slow
def test_a_forked_process_sums_by_threads_of_its_own() -> None:
    program = (
        "import os, numpy as np\n"
        "from fl_strategies.core import vectors\n"
        "vectors.THREADS = 2\n"
        "assert vectors.finite([np.ones(2 * vectors.MANY)])\n"
        "if (child := os.fork()) == 0:\n"
        "    os._exit(0 if vectors.finite([np.ones(2 * vectors.MANY)]) else 3)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)
