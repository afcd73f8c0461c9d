"""What was asked: a value that sending returns and reading takes, so that several can be open."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from fl_strategies.core.layout import Arrays, Layout
from fl_strategies.core.records import Round

if TYPE_CHECKING:
    from flwr.app import Message, Metadata


@dataclass(frozen=True)
class Request:
    """One message: the node it goes to, the clients it is about, and its identity.

    ``hosted`` says that it is packed for several clients (:mod:`fl_strategies.messages.hosting`),
    ``folds`` that it asks for one mean of their uploads.
    """

    node: int
    clients: tuple[int, ...]
    about: Metadata | None = None
    hosted: bool = False
    folds: bool = False
    together: Collection[int] = ()
    """The clients of the whole message, where those of ``clients`` are used alone."""


@dataclass(frozen=True)
class Asked:
    """The requests of one phase: of which round, who was asked, by which messages, since when.

    ``model`` holds the arrays of the global model as they were sent, ``wire`` describes all arrays
    that travel, and ``bound`` is the norm to which a wrapper told the clients to clip.
    """

    round: Round
    model: Arrays = field(default_factory=dict)
    wire: Layout | None = None
    messages: Sequence[Message] = ()
    requests: Sequence[Request] = ()
    bytes_down: int = 0
    bytes_of: Mapping[int, int] = field(default_factory=dict)
    """By client, the bytes of arrays that it is sent."""
    started: float = 0.0
    bound: float = math.inf
    seconds: float | None = None
    """How long the phase lasts by the virtual clock, if that is known before it is read."""
    late: Collection[int] = ()
    """The clients for which the round does not wait any longer."""
    by_client: Mapping[int, Asked] = field(default_factory=dict)
    """By client, the phase in which it was asked, if it is an earlier one."""

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients asked."""
        return self.round.asked

    def of(self, client: int) -> Asked:
        """Return the phase in which ``client`` was asked."""
        return self.by_client.get(client, self)

    @cached_property
    def by_node(self) -> dict[int, list[Request]]:
        """The requests to each node."""
        requests: dict[int, list[Request]] = {}
        for request in self.requests:
            requests.setdefault(request.node, []).append(request)
        return requests
