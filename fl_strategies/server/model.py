"""The global model of a round, in its three forms."""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import ArrayRecord

from fl_strategies.core.layout import Arrays, Layout
from fl_strategies.core.vectors import Vector
from fl_strategies.messages.encoding import encoded
from fl_strategies.messages.wire import decode


@dataclass(frozen=True)
class Model:
    """The global model as it travels, as arrays by name, and as its trained vector [d]."""

    record: ArrayRecord
    arrays: Arrays
    layout: Layout
    theta: Vector

    @classmethod
    def of(cls, record: ArrayRecord, layout: Layout) -> Model:
        """Return the model in ``record``; raise ``BadReply`` for what is not an array."""
        arrays = decoded(record)
        return cls(record, arrays, layout, layout.pack(arrays))

    def with_vector(self, vector: Vector, buffers: Arrays) -> Model:
        """Return the model whose trained arrays are those of ``vector`` [d], with ``buffers``."""
        arrays = self.layout.unpack(vector, {**self.arrays, **buffers})
        return Model.of(encoded_model(arrays), self.layout)


def decoded(record: ArrayRecord) -> Arrays:
    """Return the arrays of ``record`` by name, as views of its bytes."""
    return {name: decode(array) for name, array in record.items()}


def encoded_model(arrays: Arrays) -> ArrayRecord:
    """Return ``arrays`` as Flower's record."""
    return ArrayRecord({name: encoded(array) for name, array in arrays.items()})
