"""The trainable arrays of a model as one vector, and the vector as arrays, by name."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fl_strategies.core.vectors import cast

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]

VARIANCE = "running_var"
"""How the name of a buffer ends that holds variances, by PyTorch's convention."""
CONVENTIONS = ("running_mean", VARIANCE, "num_batches_tracked")
"""How the names of PyTorch's buffers end."""


@dataclass(frozen=True)
class Layout:
    """Names, shapes and types of the arrays of a model that travel.

    An algorithm's duals, tracking and averages concern the trainable arrays only, which form one
    vector in R^d. ``buffers`` (running statistics, counters) are not trained and have their own
    rules. Each group in ``ties`` holds the names of one parameter: it travels under all of them and
    counts once, under the first. ``frozen`` holds digests, by name, of arrays that nobody trains
    and that do not travel: all clients must have the same.
    """

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, np.dtype[Any]]
    buffers: frozenset[str]
    ties: tuple[tuple[str, ...], ...] = ()
    frozen: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        arrays: Arrays,
        buffers: Iterable[str] = (),
        ties: Iterable[Iterable[str]] = (),
        frozen: Mapping[str, str] | None = None,
    ) -> Layout:
        """Describe ``arrays``; raise ``ValueError`` for an array that cannot be trained or tied."""
        buffers = frozenset(buffers)
        if unknown := sorted(buffers - arrays.keys()):
            raise ValueError(f"buffers {unknown} are not among the model's arrays {list(arrays)}")
        for name, array in arrays.items():
            if name not in buffers and not np.issubdtype(array.dtype, np.floating):
                raise ValueError(
                    f"array {name!r} has type {array.dtype}: only floating-point arrays can be"
                    " trained; name it in `buffers` if it is not a parameter"
                )
            if not np.isfinite(array).all():
                way = ": a constant, such as a mask, does not travel with persistent=False"
                way *= name in buffers
                raise ValueError(f"array {name!r} of the initial model is not finite{way}")
        if buffers >= arrays.keys():
            raise ValueError("the model has no trainable array")
        if wrong := negative_variance(arrays, buffers):
            raise ValueError(f"the initial model cannot be used: {wrong}")
        return cls(
            {name: array.shape for name, array in arrays.items()},
            {name: array.dtype for name, array in arrays.items()},
            buffers,
            _in_order(arrays, buffers, ties),
            dict(frozen or {}),
        )

    @cached_property
    def untrained(self) -> list[str]:
        """Names of the buffers, in the model's order."""
        return [name for name in self.shapes if name in self.buffers]

    @cached_property
    def trainable(self) -> list[str]:
        """Names of the trainable arrays, in the model's order, each tied parameter once."""
        return [n for n in self.shapes if n not in self.buffers and n not in self.copies]

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The type that holds the numbers of all trainable arrays."""
        return np.result_type(*(self.dtypes[name] for name in self.trainable))

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all numbers."""
        return sum(math.prod(s) * self.dtypes[n].itemsize for n, s in self.shapes.items())

    @cached_property
    def copies(self) -> dict[str, str]:
        """For each further name of a tied parameter, the name under which it counts."""
        return {copy: first for first, *others in self.ties for copy in others}

    @cached_property
    def signature(self) -> str:
        """A digest that two models share when their arrays agree in name, shape and type.

        Their frozen arrays then agree in value as well.
        """
        text = repr(
            [(n, s, str(self.dtypes[n]), n in self.buffers) for n, s in self.shapes.items()]
            + [*self.ties]
            + [*sorted(self.frozen.items())]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def roles(self) -> str:
        """Which arrays are not trained and which are tied; the arrays themselves do not show it.

        Positions stand for the arrays, because arrays may travel without names.
        """
        place = {name: number for number, name in enumerate(self.shapes)}
        ties = [[place[name] for name in group] for group in self.ties]
        untrained = [number for name, number in place.items() if name in self.buffers]
        frozen = {"frozen": self.frozen_digest} if self.frozen else {}
        return json.dumps({"untrained": untrained, "tied": ties, **frozen}, separators=(",", ":"))

    @cached_property
    def frozen_digests(self) -> str:
        """The digests of the frozen arrays, in the order of their names."""
        return " ".join(digest for _, digest in sorted(self.frozen.items()))

    @cached_property
    def frozen_digest(self) -> str:
        """One digest of all frozen arrays, or "" if there are none."""
        text = repr(sorted(self.frozen.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16] if self.frozen else ""

    def difference(self, roles: str) -> str:
        """Return how a model with these :attr:`roles` differs from this one, or "" if it does not.
        Raises ``ValueError`` for a text that is no ``roles``.
        """
        if roles == self.roles:
            return ""
        names = list(self.shapes)
        try:
            told = json.loads(roles)
            untrained = {names[_place(number)] for number in told["untrained"]}
            ties = tuple(tuple(names[_place(n)] for n in group) for group in told["tied"])
            frozen_digest = str(told.get("frozen", ""))
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            raise ValueError(f"no roles of {len(names)} arrays: {roles[:100]!r}") from None
        differences = []
        if trains := [name for name in names if name in self.buffers - untrained]:
            differences.append(f"it trains {few(trains)}, which are buffers in this run")
        if still := [name for name in names if name in untrained - self.buffers]:
            differences.append(f"it does not train {few(still)}, which are trained in this run")
        if set(ties) != set(self.ties):
            differences.append(
                f"it has the tied parameters {few(ties)}, and this run {few(self.ties)}"
            )
        if frozen_digest and not self.frozen:
            differences.append("it has frozen arrays, and this run has none")
        elif frozen_digest != self.frozen_digest:
            differences.append(f"its frozen arrays are not this run's, {few([*self.frozen])}")
        return "; ".join(differences)

    def with_vectors(self, names: Sequence[str]) -> Layout:
        """Return the layout of this model followed by further vectors [d], one for each name.

        The arrays of the vector ``c`` are called ``c/array`` and have the shapes of the model's
        trainable ones. In this layout :meth:`pack` returns the model's vector followed by the
        others.
        """
        further = {f"{name}/{array}": array for name in names for array in self.trainable}
        return Layout(
            self.shapes | {key: self.shapes[array] for key, array in further.items()},
            self.dtypes | {key: self.dtypes[array] for key, array in further.items()},
            self.buffers,
            self.ties,
        )

    def pack(self, arrays: Arrays) -> npt.NDArray[Any]:
        """Return the trainable arrays as one new vector ``[d]``, in float64."""
        return np.concatenate([np.ravel(arrays[n]) for n in self.trainable], dtype=np.float64)

    def to_bytes(self, vector: npt.NDArray[Any]) -> bytes:
        """Return the trainable arrays out of ``vector`` [d], of their types, one after another."""
        arrays = self.unpack(vector, dict.fromkeys(self.buffers, np.empty(0)))
        return b"".join(arrays[name].tobytes() for name in self.trainable)

    def from_bytes(self, data: bytes) -> list[npt.NDArray[Any]]:
        """Return the trainable arrays of :meth:`to_bytes`; ``ValueError`` for another size."""
        counts = [int(np.prod(self.shapes[name])) for name in self.trainable]
        sizes = [
            n * self.dtypes[name].itemsize for n, name in zip(counts, self.trainable, strict=True)
        ]
        if len(data) != sum(sizes):
            raise ValueError(f"a vector of the model takes {sum(sizes)} bytes, got {len(data)}")
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        return [
            np.frombuffer(data, self.dtypes[name], count, start).reshape(self.shapes[name])
            for name, count, start in zip(self.trainable, counts, starts, strict=True)
        ]

    def unpack(self, vector: npt.NDArray[Any], buffers: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Return all arrays of the model: the trainable ones from ``vector``, and ``buffers``."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        start = 0
        for name, shape in self.shapes.items():
            if name in self.buffers:
                arrays[name] = buffers[name]
            elif name in self.copies:
                arrays[name] = arrays[self.copies[name]]
            else:
                stop = start + int(np.prod(shape))
                part = vector[start:stop].reshape(shape)
                arrays[name] = cast(part, self.dtypes[name])
                start = stop
        return arrays


def _in_order(
    arrays: Arrays, buffers: frozenset[str], ties: Iterable[Iterable[str]]
) -> tuple[tuple[str, ...], ...]:
    """Return ``ties`` with names and groups in the model's order; raise for an invalid group."""
    place = {name: number for number, name in enumerate(arrays)}
    groups = [list(group) for group in ties]
    tied = [name for group in groups for name in group]
    if unknown := sorted(set(tied) - arrays.keys()):
        raise ValueError(f"ties: {unknown} are not among the model's arrays {list(arrays)}")
    if untrained := sorted(buffers & set(tied)):
        raise ValueError(f"ties: {untrained} are among `buffers`, and only trained arrays are tied")
    if len(set(tied)) < len(tied) or any(len(group) < 2 for group in groups):
        raise ValueError(f"ties: each group needs two names or more, each name once, got {groups}")
    for first, *others in groups:
        for name in others:
            same = arrays[name].dtype == arrays[first].dtype
            if not (same and np.array_equal(arrays[name], arrays[first])):
                raise ValueError(f"ties: arrays {first!r} and {name!r} of the initial model differ")
    return tuple(
        sorted((tuple(sorted(g, key=place.__getitem__)) for g in groups), key=lambda g: place[g[0]])
    )


def _place(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(number)
    return number


def few(names: Sequence[object]) -> str:
    """Return the first ``names`` as text, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{list(names[:3])}{more}"


def conventional_buffers(arrays: Arrays) -> list[str]:
    """Return the names of the arrays that are buffers by PyTorch's conventions.

    These are arrays of integers or truth values, and those whose names end as ``CONVENTIONS`` say.
    """
    return [
        name
        for name, array in arrays.items()
        if array.dtype.kind in "iub" or name.endswith(CONVENTIONS)
    ]


def negative_variance(arrays: Arrays, buffers: Iterable[str]) -> str:
    """Return which running variance among ``buffers`` is below 0, and where; "" if none is.

    With it, evaluation takes the square root of a negative number.
    """
    for name in sorted(name for name in buffers if name.endswith(VARIANCE)):
        values = np.ravel(arrays[name])
        if (below := np.flatnonzero(values < 0)).size:
            first = below[0]
            return f"array {name!r} holds variances, and element {first} is {values[first]}, < 0"
    return ""


class BufferMean:
    """Merges clients' buffers: floats by a mean weighted by samples, others by the maximum."""

    def __init__(self) -> None:
        self._merged: dict[str, npt.NDArray[Any]] = {}
        self._examples = 0.0

    def add(self, buffers: Arrays, num_examples: float) -> None:
        """Add the buffers of a client with ``num_examples`` training samples."""
        self._examples += num_examples
        share = num_examples / self._examples
        for name, new in buffers.items():
            old = self._merged.get(name, new)
            if np.issubdtype(new.dtype, np.floating):
                self._merged[name] = np.asarray(old + share * (new - old), new.dtype)
            else:
                self._merged[name] = np.asarray(np.maximum(old, new))

    def value(self) -> dict[str, npt.NDArray[Any]]:
        """Return the merged buffers."""
        return dict(self._merged)
