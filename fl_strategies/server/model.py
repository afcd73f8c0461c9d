"""The global model of a round, in its three forms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flwr.app import ArrayRecord

from fl_strategies.core.layout import Arrays, Layout
from fl_strategies.core.vectors import Vector
from fl_strategies.messages.codes import lengthened, shortened
from fl_strategies.messages.description import digest
from fl_strategies.messages.encoding import encoded
from fl_strategies.messages.wire import decode


@dataclass(frozen=True)
class Model:
    """The global model: all of it as a record, the ``arrays`` that travel, its vector [d].

    The arrays of ``record`` that ``layout`` lacks do not travel, and never change.
    """

    record: ArrayRecord
    arrays: Arrays
    layout: Layout
    theta: Vector

    @classmethod
    def of(cls, record: ArrayRecord, layout: Layout) -> Model:
        """Return the model in ``record``; raise ``BadReply`` for what is not an array."""
        arrays = {name: decode(record[name]) for name in layout.shapes}
        return cls(record, arrays, layout, layout.pack(arrays))

    def rounded(self) -> Model:
        """Return the model as clients receive it with ``download=BFloat16()``."""
        arrays = {name: decode(self.record[name]) for name in self.layout.shapes}
        short = {n: shortened(a) for n, a in arrays.items() if n not in self.layout.buffers}
        arrays |= {name: lengthened(a, arrays[name].dtype) for name, a in short.items()}
        record = {n: encoded(short[n]) if n in short else self.record[n] for n in arrays}
        return Model(ArrayRecord(record), arrays, self.layout, self.layout.pack(arrays))

    @cached_property
    def travelling(self) -> ArrayRecord:
        """The record of the arrays that travel."""
        if len(self.record) == len(self.layout.shapes):
            return self.record
        return ArrayRecord({name: self.record[name] for name in self.layout.shapes})

    @property
    def digests_of_unshared(self) -> str:
        """The digests of the arrays that do not travel, each after its name."""
        stay = {
            name: decode(a) for name, a in self.record.items() if name not in self.layout.shapes
        }
        return " ".join(f"{name} {digest(array)}" for name, array in stay.items())

    def record_with(self, arrays: Arrays) -> ArrayRecord:
        """Return the record of all arrays, of which ``arrays`` are those that travel."""
        return ArrayRecord(
            {n: encoded(arrays[n]) if n in arrays else a for n, a in self.record.items()}
        )

    def with_vector(self, vector: Vector, buffers: Arrays) -> Model:
        """Return the model whose trained arrays are those of ``vector`` [d], with ``buffers``."""
        arrays = self.layout.unpack(vector, {**self.arrays, **buffers})
        return Model.of(self.record_with(arrays), self.layout)


def decoded(record: ArrayRecord) -> Arrays:
    """Return the arrays of ``record`` by name, as views of its bytes."""
    return {name: decode(array) for name, array in record.items()}
