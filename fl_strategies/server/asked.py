"""What was asked: a value that sending returns and reading takes, so that several can be open."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fl_strategies.core.layout import Arrays, Layout
from fl_strategies.core.metric_names import in_training
from fl_strategies.core.records import Round, Upload
from fl_strategies.messages.bounds import NormBound
from fl_strategies.messages.identity import Identity
from fl_strategies.messages.wire import Expected
from fl_strategies.parts.compression import Compression
from fl_strategies.parts.deadline import Deadline
from fl_strategies.parts.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from flwr.app import Message, Metadata, MetricRecord, RecordDict


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
    folded_bytes: int = 0
    """The bytes that a folded upload counts as, where hosts stand for as many nodes as clients."""
    together: Collection[int] = ()
    """The clients of the whole message, where those of ``clients`` are used alone."""


@dataclass(frozen=True)
class Policy:
    """What the replies of a phase must hold, and how they count.

    It is settled when they are asked for: what the algorithm, its parts, who calls the strategy and
    the hosts want of a reply. So a reply is read by what was asked alone.
    """

    identity: Identity
    wire: Layout
    """All arrays that travel."""
    expected: Expected
    called: Callable[[str], str] = in_training
    """Returns the metric's name for the name of a client's number."""
    phase: str = ""
    """How the names of the server's counts begin."""
    aggregation: Callable[[list[RecordDict], str], MetricRecord] | None = None
    """Returns the metrics of all clients, in place of the weighted means."""
    heeded: Mapping[str, str] = field(default_factory=dict)
    """By key to heed (:mod:`fl_strategies.messages.heeding`), what follows if a client does not."""
    settings: Collection[str] = ()
    """The settings of local training that clients were sent."""
    hosts: tuple[int, ...] = ()

    extra_vectors: tuple[str, ...] = ()
    intact: Collection[str] = ()
    """The arrays that must arrive as the client sent them."""
    told_bound: float = math.inf
    """The norm to which a wrapper told the clients to clip."""
    tells_bound: bool = False
    """Whether a wrapper tells its bound to clients alone, which then report it."""
    codec: Compression | None = None
    coded: str = ""
    """The codec as clients were asked for it."""
    uploads_changes: bool = False
    bound: NormBound | None = None
    folded: Expected | None = None
    """As ``expected``, of a folded client, where hosts send ||v - theta||^2 of its upload v."""
    most_work: Callable[[Mapping[str, Any]], float] | None = None
    """Returns the most ``work`` that a reply to a request may report, if replies report it."""
    unusable: Callable[[Sequence[Upload]], Mapping[int, str]] = lambda uploads: {}
    """Returns why the rule cannot use some of the uploads, by client."""
    weights: Callable[[Iterable[Upload]], Sequence[float]] = lambda uploads: [1.0 for _ in uploads]

    clock: VirtualClock | None = None
    """The clock, unless the algorithm itself counts virtual seconds."""
    deadline: Deadline | None = None
    wanted: int = 0
    """How many replies the phase waits for, with a deadline."""
    most_steps: Callable[[Mapping[str, Any], float, int], float] = lambda config, local, samples: (
        local
    )
    """Returns the most local steps of a request; ``Algorithm.most_steps``."""


@dataclass(frozen=True)
class Asked:
    """The requests of one phase: of which round, who was asked, by which messages, since when.

    ``model`` holds the arrays of the global model as they were sent.
    """

    round: Round
    policy: Policy
    model: Arrays = field(default_factory=dict)
    messages: Sequence[Message] = ()
    requests: Sequence[Request] = ()
    bytes_down: int = 0
    bytes_of: Mapping[int, int] = field(default_factory=dict)
    """By client, the bytes of the numbers that it is sent; if there is a clock."""
    configs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """By client, what it is told."""
    told: Mapping[str, Collection[int]] = field(default_factory=dict)
    """By key to heed, the clients whose requests have it."""
    started: float = 0.0
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
