"""Virtual time: who is there when a round begins, whose reply counts, how long the round lasts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fl_strategies.core.records import Reply, Round, Upload
from fl_strategies.core.schedules import at
from fl_strategies.messages.wire import decoded
from fl_strategies.parts.buffered import Buffered
from fl_strategies.parts.deadline import Deadline
from fl_strategies.parts.selection import Selection
from fl_strategies.solvers.local import default_training

if TYPE_CHECKING:
    from fl_strategies.server.algorithm import Algorithm
    from fl_strategies.server.asked import Asked
    from fl_strategies.server.replies import Sifted

States = Mapping[str, Any]
WEIGHTS = ("staleness", "power", "grace", "mixing")
"""Hyperparameters of a buffered pace that are of models alone."""
CLOCK, PACE = "clock", "pace"
"""The names of the clock's and of a buffered pace's state."""
SECONDS = "virtual-seconds"


class State(NamedTuple):
    """The virtual seconds since the beginning of the run."""

    seconds: float = 0.0


class AtWork(NamedTuple):
    """By round, the clients that were asked in it and are at work, since when, and their model.

    A run that resumes from a checkpoint asks them again, and by the round's random streams gets
    what it would have got.
    """

    unfinished: Mapping[int, Sequence[Any]] = {}  # which nobody changes


def check_clock(algorithm: Algorithm, called: str) -> None:
    """Raise ``ValueError`` for a clock or pace that does not go with the algorithm or a part."""
    clock, pace = algorithm.clock, algorithm.pace
    if pace is not None and (why := _not_paced(algorithm, called)):
        raise ValueError(f"pace={pace!r} does not go with {why}")
    if clock is not None and algorithm.counts_time and (clock.links or clock.shared):
        raise ValueError(
            f"clock={clock!r} does not go with {called}, whose clock counts work alone: leave out"
            " links, dropout, files and shared devices"
        )


def _not_paced(algorithm: Algorithm, called: str) -> str:
    """Return what the pace does not go with, and why; "" if there is nothing."""
    pace, selection = algorithm.pace, algorithm.selection
    by_arrival = pace is not None and pace.order == "arrival"
    if algorithm.clock is None and not by_arrival:
        return "no clock: it goes by clock=Clock(...)"
    if algorithm.clock is not None and by_arrival:
        return f"clock={algorithm.clock!r}: replies arrive in real time; leave out the clock"
    if algorithm.privacy is not None:
        return f"privacy={algorithm.privacy!r}: who is late depends on the others; use no pace"
    if algorithm.counts_draws:
        return f"selection={selection!r}, which counts on each draw; use Uniform or Probabilities"
    chosen = selection is not None and not isinstance(selection, Selection)
    cuts = isinstance(pace, Deadline) and pace.cut
    if (
        algorithm.clock is not None
        and algorithm.clock.shared
        and (cuts or isinstance(pace, Buffered))
    ):
        return f"clock={algorithm.clock!r}, whose clients wait for each other: use per_device=1"
    if isinstance(pace, Buffered):
        return _not_buffered(algorithm, pace, called, chosen=chosen)
    if not isinstance(pace, Deadline):
        return ""
    if pace.over_select > 1.0 and (algorithm.chooses_clients or chosen):
        return f"{'a function' if chosen else called}, which itself says who is asked"
    if pace.cut and not algorithm.uses_local:
        return f"{called}, whose hyperparameters set its steps; use cut=False"
    return ""


def _not_buffered(algorithm: Algorithm, pace: Buffered, called: str, *, chosen: bool) -> str:
    """Return what a buffered pace does not go with, and why; "" if there is nothing."""
    least = max(algorithm.min_replies, algorithm.combine.least if algorithm.combine else 1)
    if chosen:
        return "a function, which itself says who is asked"
    if algorithm.averages != "models" and {*pace.values} & {*WEIGHTS}:
        return f"{called}, which takes changes whole: leave out {', '.join(WEIGHTS)}"
    if pace.size < least:
        return f"rounds that need {least} replies: use a larger size"
    return ""


def begun(algorithm: Algorithm, states: States) -> States:
    """Return the states of clock and pace, by name, at the beginning of a ``start``."""
    first: dict[str, Any] = {}
    if algorithm.clock is not None and not algorithm.counts_time:
        first[CLOCK] = states.get(CLOCK, State())
    if isinstance(algorithm.pace, Buffered):
        first[PACE] = states.get(PACE, AtWork())
    return first


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
        if isinstance(algorithm.pace, Deadline):
            sifted = replace(sifted, counts={**sifted.counts, "clients-late": len(asked.late)})
        return sifted, 0.0
    ends: dict[int, float] = {}
    dropped: set[int] = set()
    for client in asked.clients:
        reply = good[client][0] if client in good else None
        ends[client], leaves = ends_after(algorithm, asked.of(client), client, reply)
        dropped |= {client} if leaves else set()
    ends = clock.together(ends)
    counts = {"clients-dropped": len(dropped)} if clock.loses else {}
    good = {client: pair for client, pair in good.items() if client not in dropped}
    seconds = max(ends.values(), default=clock.idle)
    late: dict[int, str] = {}
    if isinstance(algorithm.pace, Deadline) and ends:
        lost = {client: end for client, end in ends.items() if client not in good}
        replies = {client: ends[client] for client in good}
        used, seconds = algorithm.pace.first(replies, lost, wanted_replies(algorithm, asked.round))
        late = {c: f"it came after {end:g} s" for c, end in replies.items() if c not in used}
        counts["clients-late"] = len(late)
        good = {client: pair for client, pair in good.items() if client not in late}
    counts = {**sifted.counts, **counts, "clients-used": len(good)}
    unusable = {**sifted.unusable, **late}
    seconds = seconds if asked.seconds is None else asked.seconds
    return replace(sifted, good=good, counts=counts, unusable=unusable), seconds


def ends_after(
    algorithm: Algorithm, asked: Asked, client: int, reply: Reply | None
) -> tuple[float, bool]:
    """Return the seconds from a client's request to its reply, and whether it leaves before.

    ``reply`` is None if there is none to be used.
    """
    assert algorithm.clock is not None
    steps, up = (0.0, 0) if reply is None else work_of(algorithm, asked, reply)
    about = asked.round.seed, asked.round.number, client
    seconds = algorithm.clock.seconds(*about, steps, asked.bytes_of.get(client, 0), up)
    share = algorithm.clock.drops_out(*about)
    return (seconds, False) if share is None else (seconds * share, True)


def wanted_replies(algorithm: Algorithm, round: Round, busy: int = 0) -> int:
    """Return how many replies a round waits for, while ``busy`` clients are at work."""
    pace, there = algorithm.pace, len(round.connected) + busy
    if not isinstance(pace, Deadline) or pace.over_select == 1.0:
        return len(round.asked)
    return min(len(round.asked), algorithm.asked_of(there))


def over_selected(algorithm: Algorithm, there: int, busy: int) -> int:
    """Return how many are asked of the clients that are ``there``, while ``busy`` are at work."""
    size, pace = algorithm.asked_of(there + busy), algorithm.pace
    if isinstance(pace, Buffered):
        return min(there, max(pace.concurrency - busy, 0))
    return pace.asked(size, there) if isinstance(pace, Deadline) else size


def step_limits(
    algorithm: Algorithm, round: Round, down: Mapping[int, int], up: int, *, trains: bool
) -> Iterator[tuple[int, int]]:
    """Yield the clients whose steps are limited to the deadline, and to how many."""
    clock, pace = algorithm.clock, algorithm.pace
    if clock is None or not isinstance(pace, Deadline) or not trains:
        return
    for client, size in down.items():
        if steps := pace.steps(clock, round.seed, round.number, client, size, up):
            yield client, steps


def work_of(algorithm: Algorithm, asked: Asked, reply: Reply) -> tuple[float, int]:
    """Return the local steps that a reply reports, or its settings' most, and its bytes."""
    steps = reply.numbers.get("steps")
    if not isinstance(steps, int | float) or not 0.0 <= steps < math.inf:
        local: Mapping[str, Any] = algorithm.local or {}
        local = {name: at(value, asked.round.number) for name, value in local.items()}
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
