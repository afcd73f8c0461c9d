"""The round as records: what a client sent, and what the server rule is handed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from fl_strategies.core.layout import Arrays
from fl_strategies.core.vectors import Vector

NOTHING: Mapping[str, Any] = MappingProxyType({})


class BadReply(ValueError):
    """A reply that cannot be used; its text is the reason."""


@dataclass(frozen=True)
class Reply:
    """A client's reply, decoded once and within its bounds.

    ``round`` is that of the request it answers. ``content`` is what Flower's own metrics functions
    take; everything else reads ``numbers`` and ``words``.
    """

    client: int
    round: int
    num_examples: float
    numbers: Mapping[str, Any]
    words: Mapping[str, str] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    content: Any = None


class Upload(NamedTuple):
    """What a usable reply brings to the server rule.

    ``vector`` [d] holds the trainable arrays, ``beside`` further vectors [d] by name, where the
    algorithm has any, ``buffers`` the arrays that are not trained. ``newcomer`` says that no reply
    of this client was used before; ``round`` is that of the request it answers.
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


@dataclass(frozen=True)
class Uploads:
    """A round's usable uploads, ascending by client: what ``aggregate`` is handed.

    ``round`` numbers the communication round, 1, 2, ..., as schedules are read; ``population``
    is m, clients ever connected (or declared, if more); ``asked`` are the clients asked this round.
    """

    uploads: Sequence[Upload]
    round: int = 1
    population: int = 0
    asked: Sequence[int] = field(default=())

    def __iter__(self) -> Iterator[Upload]:
        return iter(self.uploads)

    def __len__(self) -> int:
        return len(self.uploads)
