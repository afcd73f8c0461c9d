"""A population of clients whose data are drawn from a seed, all at once or when they are needed.

A client's data depend on the seed and its number alone, so both are the same to the bit. What is
drawn when it is needed looks like NumPy's arrays: of 1,000,000 clients a run holds the data of
those that train.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fl_strategies.core.randomness import stream

AT_ONCE = 1000
"""Up to so many clients are drawn at once. Of more, the server's test set is that of so many."""

Rows: TypeAlias = NDArray[np.int64]
Samples: TypeAlias = tuple[NDArray[np.floating[Any]], Rows]


@dataclass(frozen=True, eq=False)
class Population:
    """``draw(i)`` returns inputs [n_i, features] and classes [n_i] of client i.

    ``counts`` [clients] are the n_i; the first ``train`` [clients] samples of each are for
    training.
    """

    draw: Callable[[int], Samples]
    counts: Rows
    train: Rows
    features: int
    dtype: DTypeLike

    @functools.cached_property
    def ends(self) -> tuple[Rows, Rows]:
        """Where each client's training and test samples end, if clients are one after another."""
        return np.cumsum(self.train), np.cumsum(self.counts - self.train)

    @functools.cached_property
    def client(self) -> Callable[[int], Samples]:
        """``draw``, which keeps what it drew last."""
        return functools.lru_cache(maxsize=8)(self.draw)

    def part(self, i: int, test: bool) -> Samples:
        """Return client i's training or test samples."""
        (x, y), cut = self.client(i), self.train[i]
        return (x[cut:], y[cut:]) if test else (x[:cut], y[:cut])

    def arrays(self, test: bool) -> tuple[Any, Any, Any]:
        """Return inputs, classes and owners: arrays, or what looks like them if there are many."""
        owners = Owners(self.ends[test])
        if len(self.counts) > AT_ONCE:
            return Drawn(self, 0, test), Drawn(self, 1, test), owners
        x, y = zip(*(self.part(i, test) for i in range(len(self.counts))), strict=True)
        return np.concatenate(x), np.concatenate(y), np.asarray(owners)


class Owners:
    """The client of each sample, if clients are one after another: as an int64 array [n]."""

    def __init__(self, ends: Rows) -> None:
        self.ends = ends

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, rows: Any) -> Any:
        return np.searchsorted(self.ends, _indices(rows, len(self)), side="right")

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Rows:
        return np.repeat(np.arange(len(self.ends)), np.diff(self.ends, prepend=0))

    def of(self, client: int) -> Rows:
        """Return the samples of a client."""
        return np.arange(self.ends[client - 1] if client else 0, self.ends[client])

    def sample(self) -> Rows:
        """Return the samples of ``AT_ONCE`` clients, always the same ones."""
        clients = len(self.ends)
        chosen = stream(0, "tested-clients").choice(clients, min(AT_ONCE, clients), replace=False)
        return np.concatenate([self.of(client) for client in np.sort(chosen)])


class Parts(Sequence[tuple[Rows, Rows]]):
    """Each client's samples for training, and none for tests of its own."""

    def __init__(self, owners: Owners) -> None:
        self.owners = owners

    def __len__(self) -> int:
        return len(self.owners.ends)

    def __getitem__(self, client: Any) -> Any:
        if not -len(self) <= client < len(self):
            raise IndexError(client)
        return self.owners.of(client % len(self)), np.empty(0, np.int64)


class Drawn:
    """Inputs (``which`` = 0) or classes (1) of a population, drawn each time they are asked for."""

    def __init__(self, population: Population, which: int, test: bool) -> None:
        self.population, self.which, self.test = population, which, test
        self.owners = Owners(population.ends[test])
        self.shape = (len(self.owners), *([population.features] if which == 0 else []))
        self.dtype = np.dtype(population.dtype if which == 0 else np.int64)
        self.size, self.itemsize = math.prod(self.shape), self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        rows = _indices(rows, len(self))
        parts = np.split(rows, np.flatnonzero(np.diff(self.owners[rows])) + 1)
        picked = [self._picked(part) for part in parts if len(part)]
        nothing = np.empty((0, *self.shape[1:]), self.dtype)
        return picked[0] if len(picked) == 1 else np.concatenate([*picked, nothing])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return self[:]

    def _picked(self, rows: Rows) -> NDArray[Any]:
        """Return samples of one client."""
        client = int(self.owners[rows[0]])
        first = self.owners.ends[client - 1] if client else 0
        return self.population.part(client, self.test)[self.which][rows - first]


def _indices(rows: Any, length: int) -> Rows:
    """Return the indices that a slice, a number or an array means."""
    if isinstance(rows, slice):
        return np.arange(*rows.indices(length))
    return np.asarray(rows)
