"""The round as records: a client's reply, and the server rule's input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from fl_strategies.core.layout import Arrays
from fl_strategies.core.vectors import Vector

NOTHING: Mapping[str, Any] = MappingProxyType({})

MISSED = "missed"
"""Where a training request's config has, as bytes, the vector [d] that its client missed."""


class BadReply(ValueError):
    """A reply cannot be used; the exception's text is the reason."""


@dataclass(frozen=True)
class Reply:
    """A client's reply, decoded once and checked against its bounds.

    ``round`` is the round of the request. ``content`` is for Flower's own metrics functions;
    everything else reads ``numbers`` and ``words``.
    """

    client: int
    round: int
    num_examples: float
    numbers: Mapping[str, Any]
    words: Mapping[str, str] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    content: Any = None


class Upload(NamedTuple):
    """A usable reply, as the server rule gets it.

    ``vector`` [d] holds the trainable arrays, ``beside`` the algorithm's further vectors [d] by
    name, ``buffers`` the arrays that are not trained. ``newcomer`` says that no reply of this
    client was used before; ``round`` is the round of the request. If ``vector`` is a host's mean,
    ``distance2`` is the host's word for ||v - theta||^2, v being the client's own vector.
    """

    client: int
    vector: Vector
    num_examples: float
    scalars: Mapping[str, float] = NOTHING
    beside: Mapping[str, Vector] = NOTHING
    buffers: Arrays = NOTHING
    newcomer: bool = False
    round: int = 0
    nonce: str = ""
    distance2: float | None = None


@dataclass(frozen=True)
class Uploads:
    """A round's usable uploads, ascending by client: the argument of ``aggregate``.

    ``round`` is the number 1, 2, ... of the communication round, by which schedules are read;
    ``population`` is m, the number of clients ever connected (or declared, if more); ``asked`` are
    the clients asked in this round.
    """

    uploads: Sequence[Upload]
    round: int = 1
    population: int = 0
    asked: Sequence[int] = field(default=())

    def __iter__(self) -> Iterator[Upload]:
        return iter(self.uploads)

    def __len__(self) -> int:
        return len(self.uploads)
