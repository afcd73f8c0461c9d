"""The round as records: what a rule may know of it, a client's reply, and the rule's input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from numpy.random import Generator

from fl_strategies.core.last_metrics import LastMetrics
from fl_strategies.core.layout import Arrays, Layout
from fl_strategies.core.randomness import stream
from fl_strategies.core.vectors import Number, Vector, weighted_mean

Mean: TypeAlias = Callable[[Iterable[tuple[Vector, Number]]], Vector]
"""Returns one vector [d] for pairs of a vector [d] and its weight."""

NOTHING: Mapping[str, Any] = MappingProxyType({})

CATCH_UP = "catch-up"
"""Where a training request's config has, as bytes, its client's catch-up vector [d]."""


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

    ``vector`` [d] holds the trainable arrays, ``extra_vectors`` the algorithm's further vectors [d]
    by name, ``buffers`` the arrays that are not trained. ``newcomer`` says that no reply of this
    client was used before; ``round`` is the round of the request. If ``vector`` is a host's mean,
    ``distance2`` is the host's word for ||v - theta||^2, v being the client's own vector.
    ``received`` is the model [d] that the client was sent, where it is that of an earlier phase.
    """

    client: int
    vector: Vector
    num_examples: float
    scalars: Mapping[str, float] = NOTHING
    extra_vectors: Mapping[str, Vector] = NOTHING
    buffers: Arrays = NOTHING
    newcomer: bool = False
    round: int = 0
    nonce: str = ""
    distance2: float | None = None
    received: Vector | None = None


@dataclass(frozen=True)
class Round:
    """A communication round: all that hooks and rules know of it.

    ``number`` is 1, 2, ... over all calls of ``start``, and 0 before the first; schedules are read
    by it. ``theta`` [d] is the global model that the round begins with, ``layout`` its arrays.
    ``connected`` and ``asked`` are clients, ascending; ``population`` is m, the number of clients
    ever connected (or declared, if more). ``acked`` holds, by client, the round of its last used
    reply before this round. ``seed`` is the run's, ``run`` its id. Once replies are read,
    ``traffic`` counts the bytes of the round's messages, and ``rejected`` the clients whose replies
    cannot be used. A rule that averages does so by ``mean`` alone.
    ``samples`` are clients' numbers of samples, and ``draws`` says how often each client was drawn,
    where a part selects by them (``fl_strategies.parts.selection``). ``metrics`` are the last loss,
    accuracy and seconds of each client that was ever asked. ``rounded`` is theta [d] as it
    travelled, if it was rounded (``download``). ``asks`` says how often the round has asked before.
    """

    number: int = 1
    theta: Vector = 0.0
    layout: Layout | None = None
    connected: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    population: int = 0
    acked: Mapping[int, int] = field(default_factory=dict)
    seed: int = 0
    run: str = ""
    traffic: int = 0
    rejected: int = 0
    mean: Mean = weighted_mean
    samples: Mapping[int, int] = field(default_factory=dict)
    draws: Mapping[int, int] = field(default_factory=dict)
    metrics: LastMetrics = field(default_factory=LastMetrics)
    rounded: Vector | None = None
    asks: int = 0

    def stream(self, purpose: str) -> Generator:
        """Return the generator of ``purpose``: one for each time that the round asks clients."""
        return stream(self.seed, purpose, self.number, *([self.asks] if self.asks else []))

    @property
    def received(self) -> Vector:
        """The global model [d] as clients received it."""
        return self.theta if self.rounded is None else self.rounded

    def received_by(self, upload: Upload) -> Vector:
        """Return the model [d] from which the client of ``upload`` began."""
        return self.received if upload.received is None else upload.received
