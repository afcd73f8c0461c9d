"""Rounds with a pace: clients are asked while others are at work, the first replies are used.

By the virtual clock a new client works at once, and its reply is held until it is due. So a phase
has one client; by arrival it has those of one message, whose reply brings all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fl_strategies.core.records import BadReply
from fl_strategies.parts.buffered import Buffered
from fl_strategies.parts.deadline import Deadline
from fl_strategies.server.enough import clients_needed
from fl_strategies.server.model import Model
from fl_strategies.server.phases import Phase, Phases, as_one_phase
from fl_strategies.server.replies import content_as
from fl_strategies.server.stages import described
from fl_strategies.server.timing import CLOCK, PACE, AtWork, ends_after, wanted_replies

if TYPE_CHECKING:
    from flwr.app import ConfigRecord, Message
    from flwr.serverapp import Grid

    from fl_strategies.parts.pace import Pace
    from fl_strategies.server.algorithm import Algorithm
    from fl_strategies.server.asked import Asked
    from fl_strategies.server.strategy import FederatedStrategy


@dataclass
class Work(Phase):
    """Clients at work: the virtual second in which they were asked, and what came of it."""

    since: float = 0.0
    took: float = 0.0
    usable: int | None = None
    """How many of their replies can be used, once these are there."""


def waits_for_all(algorithm: Algorithm) -> bool:
    """Return whether a round waits for the replies of all that it asked."""
    pace = algorithm.pace
    return pace is None or (pace.order == "virtual" and not isinstance(pace, Buffered))


def check_hooks(strategy: FederatedStrategy) -> None:
    """Raise ``ValueError`` for hooks of Flower's that only a round which waits for all calls."""
    for name in ("configure_train", "aggregate_train"):
        if not getattr(type(strategy), name).__module__.startswith("fl_strategies."):
            raise ValueError(
                f"{described(strategy)} does not call the {name} of {type(strategy).__name__}:"
                " only a round that waits for all replies does"
            )


def asked_and_replies(
    strategy: FederatedStrategy, grid: Grid, timeout: float, config: ConfigRecord
) -> tuple[Asked, list[Message]]:
    """Return the round's phase, and the replies that its pace waits for."""
    check_hooks(strategy)
    pace = strategy.pace
    begins = strategy.run.round == strategy.run.first
    if begins:
        strategy.phases = Phases(started=time.monotonic())
    if isinstance(pace, Buffered):
        if begins:
            _ask_again(strategy, pace, grid, config)
        return _buffered(strategy, pace, grid, timeout, config)
    assert isinstance(pace, Deadline)
    return _by_deadline(strategy, pace, grid, timeout, config)


def _by_deadline(
    strategy: FederatedStrategy, pace: Deadline, grid: Grid, timeout: float, config: ConfigRecord
) -> tuple[Asked, list[Message]]:
    """Return the round's phase, and the first replies of those that come in time."""
    phases = strategy.phases
    _take_late(strategy, grid, timeout)
    asked = strategy.ask(config, grid)
    wanted = wanted_replies(strategy, asked.round, len(phases.busy))
    phases.open |= _works(asked, strategy.opened_model, 0.0, pace)
    _wait(strategy, grid, min(timeout, pace.seconds or math.inf), wanted)
    used = phases.close(first(_ended(strategy), wanted))
    late = phases.close([*phases.open])  # a reply that comes later belongs to no open phase
    clients = frozenset(client for work in late for client in work.asked.clients)
    return replace(asked, late=clients), [reply for work in used for reply in work.replies]


def _take_late(strategy: FederatedStrategy, grid: Grid, timeout: float) -> None:
    """Take in late replies; wait for one, ``timeout`` seconds, while all clients are at work."""
    phases, until = strategy.phases, time.monotonic() + timeout
    pause: float | None = 0.0
    nodes = strategy.nodes.wait(grid, clients_needed(strategy))
    while phases.underway and time.monotonic() < until:
        phases.pull(grid, pause)
        if not nodes.keys() <= phases.busy:
            return
        pause = None


def _buffered(
    strategy: FederatedStrategy, pace: Buffered, grid: Grid, timeout: float, config: ConfigRecord
) -> tuple[Asked, list[Message]]:
    """Return the round's phase, and the first replies of those that are at work."""
    phases = strategy.phases
    now = strategy.parts[CLOCK].seconds if CLOCK in strategy.parts else 0.0
    asked = strategy.ask(config, grid)
    phases.open |= _works(asked, strategy.opened_model, now, pace)
    if pace.order == "virtual":
        phases.send_and_receive(grid, timeout, partial(_end, strategy))
    else:
        _wait(strategy, grid, timeout, pace.size)
    closed = phases.close(first(_ended(strategy), pace.size))
    strategy.parts = {**strategy.parts, PACE: AtWork(_unfinished(phases))}
    together, replies = as_one_phase(closed, asked)
    if CLOCK not in strategy.parts:
        return together, replies
    took = [work.since - now + work.took for work in closed if isinstance(work, Work)]
    seconds = max(took, default=strategy.clock.idle if strategy.clock else 0.0)
    return replace(together, seconds=max(seconds, 0.0)), replies


def _works(asked: Asked, model: Model, since: float, pace: Pace) -> dict[int, Phase]:
    """Return the phases of what was asked, by their first client."""
    works: dict[int, Phase] = {}
    for message, request in zip(asked.messages, asked.requests, strict=True):
        alone = pace.order == "virtual"
        everyone = frozenset(request.clients)
        for clients in [(c,) for c in request.clients] if alone else [request.clients]:
            own = replace(
                asked,
                round=replace(asked.round, asked=clients),
                messages=[message],
                requests=[replace(request, clients=clients, together=everyone)],
                bytes_down=asked.bytes_down * len(clients) // len(asked.clients),
            )
            works[clients[0]] = Work(own, model, math.inf, since=since)
    return works


def _replies(strategy: FederatedStrategy, work: Phase) -> Iterator[Any]:
    """Yield the usable replies of a phase."""
    read = partial(strategy.reader.reply, strategy.state, work.asked, strategy.caller)
    for client, content in work.contents():
        with suppress(BadReply):
            yield content_as(client, content, read)


def _end(strategy: FederatedStrategy, client: int, work: Phase) -> float:
    """Return the virtual second in which the client's work ends."""
    assert isinstance(work, Work)
    reply = next(_replies(strategy, work), None)
    work.took, lost = ends_after(strategy, work.asked, client, reply)
    work.usable = int(reply is not None and not lost)
    return work.since + work.took


def _ended(strategy: FederatedStrategy) -> dict[int, tuple[float, int]]:
    """Return the end of each phase that has ended, and how many usable replies it has."""
    ended: dict[int, tuple[float, int]] = {}
    for key, work in strategy.phases.open.items():
        if work.end is not None and isinstance(work, Work):
            if work.usable is None:
                work.usable = sum(1 for _ in _replies(strategy, work))
            ended[key] = work.end, work.usable
    return ended


def first(works: Mapping[int, tuple[float, int]], size: int) -> list[int]:
    """Return the keys of the works that a step closes: up to the ``size``-th usable reply.

    ``works`` gives each one's end and how many usable replies it has.
    """
    closed, usable = list[int](), 0
    for key in sorted(works, key=lambda key: (works[key][0], key)):
        if usable >= size:
            break
        closed.append(key)
        usable += works[key][1]
    return sorted(closed)


def _wait(strategy: FederatedStrategy, grid: Grid, timeout: float, size: int) -> None:
    """Send what is new; wait for ``size`` usable replies, all at work, or ``timeout`` seconds."""
    phases, until = strategy.phases, time.monotonic() + timeout
    phases.push(grid)
    while phases.new and time.monotonic() < until:
        if sum(usable for _, usable in _ended(strategy).values()) >= size:
            return
        phases.pull(grid)


# ---- work that outlasts a process ---------------------------------------------------------------


def _unfinished(phases: Phases) -> Mapping[int, Sequence[Any]]:
    """Return the open work as a checkpoint holds it."""
    works: dict[int, list[Any]] = {}
    for work in phases.open.values():
        assert isinstance(work, Work)
        rest = work.since, work.model.arrays
        works.setdefault(work.asked.round.number, [[], *rest])[0] += work.asked.clients
    return works


def _ask_again(
    strategy: FederatedStrategy, pace: Buffered, grid: Grid, config: ConfigRecord
) -> None:
    """Open the unfinished work of the clients that are connected."""
    unfinished = strategy.parts[PACE].unfinished
    nodes = strategy.nodes.wait(grid, clients_needed(strategy)) if unfinished else {}
    for number, (clients, since, arrays) in unfinished.items():
        opened = strategy.opened_model
        model = Model.of(opened.record_with(arrays), opened.layout)
        there = tuple(client for client in clients if client in nodes)
        round = replace(strategy.make_round(number, nodes), theta=model.theta, asked=there)
        asked = strategy.send(round, model, config, nodes)
        strategy.phases.open |= _works(asked, model, since, pace)
