"""Virtual time: who is there when a round begins, whose reply counts, how long the round lasts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fl_strategies.core.records import Reply, Round, Upload
from fl_strategies.core.schedules import at
from fl_strategies.messages.wire import decoded
from fl_strategies.solvers.local import default_training

if TYPE_CHECKING:
    from fl_strategies.server.algorithm import Algorithm
    from fl_strategies.server.asked import Asked
    from fl_strategies.server.replies import Sifted

States = Mapping[str, Any]
CLOCK = "clock"
"""The name of the clock's state."""
SECONDS = "virtual-seconds"


class State(NamedTuple):
    """The virtual seconds since the beginning of the run."""

    seconds: float = 0.0


def check_clock(algorithm: Algorithm, called: str) -> None:
    """Raise ``ValueError`` for a clock that the algorithm, which counts time itself, ignores."""
    clock = algorithm.clock
    if clock is not None and algorithm.counts_time and clock.links:
        raise ValueError(
            f"clock={clock!r} does not go with {called}, whose clock counts work alone: leave out"
            " links, dropout and files"
        )


def begun(algorithm: Algorithm, states: States) -> States:
    """Return the clock's state, by its name, at the beginning of a ``start``."""
    if algorithm.clock is None or algorithm.counts_time:
        return {}
    return {CLOCK: states.get(CLOCK, State())}


def with_those_there(algorithm: Algorithm, state: Any, states: States, round: Round) -> Round:
    """Return the round, of whose connected clients those that are away are left out."""
    part = algorithm.availability
    if part is None:
        return round
    now = _now(algorithm, state, states, round)
    there = part.there(round.seed, round.number, now, round.connected)
    return replace(round, connected=there)


def _now(algorithm: Algorithm, state: Any, states: States, round: Round) -> float:
    own = algorithm.virtual_seconds(state)
    if own is not None:
        return own
    return float(states[CLOCK].seconds if CLOCK in states else round.number - 1)


def in_time(
    algorithm: Algorithm, asked: Asked, sifted: Sifted[tuple[Reply, Upload]]
) -> tuple[Sifted[tuple[Reply, Upload]], float]:
    """Return the replies of a phase that count by the clock, and how many seconds it lasted."""
    clock, good = algorithm.clock, sifted.good
    if clock is None or algorithm.counts_time:
        return sifted, 0.0
    ends: dict[int, float] = {}
    dropped: set[int] = set()
    for client in asked.clients:
        steps, up = work_of(algorithm, asked, good[client][0]) if client in good else (0.0, 0)
        about = asked.round.seed, asked.rounds.get(client, asked.round.number), client
        ends[client] = clock.seconds(*about, steps, asked.bytes_of.get(client, 0), up)
        if (share := clock.drops_out(*about)) is not None:
            dropped.add(client)
            ends[client] *= share
    counts = {"clients-dropped": len(dropped)} if clock.loses else {}
    good = {client: pair for client, pair in good.items() if client not in dropped}
    counts = {**sifted.counts, **counts, "clients-used": len(good)}
    return replace(sifted, good=good, counts=counts), max(ends.values(), default=clock.idle)


def work_of(algorithm: Algorithm, asked: Asked, reply: Reply) -> tuple[float, int]:
    """Return the local steps that a reply reports, or its settings' most, and its bytes."""
    steps = reply.numbers.get("steps")
    if not isinstance(steps, int | float) or not 0.0 <= steps < math.inf:
        local = {
            name: at(value, asked.round.number) if isinstance(value, Mapping) else value
            for name, value in (algorithm.local or {}).items()
        }
        steps = default_training().updated(local).most_steps(int(reply.num_examples))
    records = getattr(reply.content, "array_records", None) or {}
    arrays = [a for record in records.values() for a in decoded(record).values()]
    return steps, sum(array.nbytes for array in arrays or reply.arrays.values())


def passed(states: States, seconds: float) -> tuple[States, dict[str, float]]:
    """Return the states after so many virtual seconds more, and the round's metric."""
    if CLOCK not in states:
        return states, {}
    now = states[CLOCK].seconds + seconds
    return {**states, CLOCK: State(now)}, {SECONDS: now}
