"""One vector for all trainable arrays of a model, and back, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Layout:
    """Names, shapes and types of a model's arrays; ``buffers`` are those that are not trained.

    Duals, tracking and averages by algorithm touch the trainable arrays only, which form one vector
    in R^d. Buffers (running statistics, counters, frozen weights) have rules of their own.
    """

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, np.dtype[Any]]
    buffers: frozenset[str]

    @classmethod
    def of(cls, arrays: Arrays, buffers: Iterable[str] = ()) -> Layout:
        """Describe ``arrays``; raise ``ValueError`` for an array that cannot be trained."""
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
                raise ValueError(f"array {name!r} of the initial model is not finite")
        if buffers >= arrays.keys():
            raise ValueError("the model has no trainable array")
        return cls(
            {name: array.shape for name, array in arrays.items()},
            {name: array.dtype for name, array in arrays.items()},
            buffers,
        )

    @cached_property
    def trainable(self) -> list[str]:
        """Names of the trainable arrays, in the model's order."""
        return [name for name in self.shapes if name not in self.buffers]

    @cached_property
    def signature(self) -> str:
        """A digest that two models share when their arrays agree in name, shape and type."""
        text = repr(
            [(n, s, str(self.dtypes[n]), n in self.buffers) for n, s in self.shapes.items()]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def beside(self, names: Sequence[str]) -> Layout:
        """Return the layout of this model followed by further vectors [d], one for each name.

        The arrays of the vector ``c`` are ``c/array``, shaped like the model's trainable ones. In
        that layout :meth:`pack` returns the model's vector with the others after it.
        """
        further = {f"{name}/{array}": array for name in names for array in self.trainable}
        return Layout(
            self.shapes | {key: self.shapes[array] for key, array in further.items()},
            self.dtypes | {key: self.dtypes[array] for key, array in further.items()},
            self.buffers,
        )

    def pack(self, arrays: Arrays) -> npt.NDArray[Any]:
        """Return the trainable arrays as one new vector ``[d]``, in float64 for exact sums."""
        return np.concatenate([np.ravel(arrays[n]) for n in self.trainable], dtype=np.float64)

    def unpack(self, vector: npt.NDArray[Any], buffers: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Return all arrays of the model: the trainable ones out of ``vector``, and ``buffers``."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        start = 0
        for name, shape in self.shapes.items():
            if name in self.buffers:
                arrays[name] = buffers[name]
            else:
                stop = start + int(np.prod(shape))
                part = vector[start:stop].reshape(shape)
                arrays[name] = np.asarray(part, dtype=self.dtypes[name])
                start = stop
        return arrays


class BufferMean:
    """Merges clients' buffers: floats averaged by examples, integers and booleans by maximum."""

    def __init__(self) -> None:
        self._merged: dict[str, npt.NDArray[Any]] = {}
        self._examples = 0

    def add(self, buffers: Arrays, num_examples: int) -> None:
        """Take in the buffers of a client with ``num_examples`` training examples."""
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
