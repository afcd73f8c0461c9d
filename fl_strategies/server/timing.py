"""Virtual time of a phase: whose reply counts, and how long the phase lasts."""

from __future__ import annotations

from dataclasses import replace

from fl_strategies.core.log import log_once
from fl_strategies.core.records import Reply, Upload
from fl_strategies.messages.wire import decoded
from fl_strategies.server.asked import Asked
from fl_strategies.server.replies import Sifted
from fl_strategies.solvers.local import default_training

TOO_MANY = (
    "clients report more local steps than their requests allow, and the clock counts those allowed:"
    " local={'epochs': ..., 'batch-size': ...} tells clients how to train"
)


def in_time(
    asked: Asked, sifted: Sifted[tuple[Reply, Upload]]
) -> tuple[Sifted[tuple[Reply, Upload]], float]:
    """Return the replies of a phase that count by the clock, and how many seconds it lasted."""
    clock, deadline, good = asked.policy.clock, asked.policy.deadline, sifted.good
    if clock is None:
        if deadline is not None:
            sifted = replace(sifted, counts={**sifted.counts, "clients-late": len(asked.late)})
        return sifted, 0.0
    ends: dict[int, float] = {}
    dropped: set[int] = set()
    for client in asked.clients:
        reply = good[client][0] if client in good else None
        ends[client], leaves = ends_after(asked.of(client), client, reply)
        dropped |= {client} if leaves else set()
    ends = clock.together(ends)
    counts = {"clients-dropped": len(dropped)} if clock.loses else {}
    good = {client: pair for client, pair in good.items() if client not in dropped}
    seconds = max(ends.values(), default=clock.idle)
    late: dict[int, str] = {}
    if deadline is not None and ends:
        lost = {client: end for client, end in ends.items() if client not in good}
        replies = {client: ends[client] for client in good}
        used, seconds = deadline.first(replies, lost, asked.policy.wanted)
        late = {c: f"it came after {end:g} s" for c, end in replies.items() if c not in used}
        counts["clients-late"] = len(late)
        good = {client: pair for client, pair in good.items() if client not in late}
    counts = {**sifted.counts, **counts, "clients-used": len(good)}
    unusable = {**sifted.unusable, **late}
    seconds = seconds if asked.seconds is None else asked.seconds
    return replace(sifted, good=good, counts=counts, unusable=unusable, took=ends), seconds


def ends_after(asked: Asked, client: int, reply: Reply | None) -> tuple[float, bool]:
    """Return the seconds from a client's request to its reply, and whether it leaves before.

    ``reply`` is None if there is none to be used.
    """
    clock = asked.policy.clock
    assert clock is not None
    steps, up = (0.0, 0) if reply is None else work_of(asked, reply)
    about = asked.round.seed, asked.round.number, client
    seconds = clock.seconds(*about, steps, asked.bytes_of.get(client, 0), up)
    share = clock.drops_out(*about)
    return (seconds, False) if share is None else (seconds * share, True)


def work_of(asked: Asked, reply: Reply) -> tuple[float, int]:
    """Return the local steps that a reply reports, at most those of its request, and its bytes."""
    config, samples = asked.configs.get(reply.client, {}), int(reply.num_examples)
    local = default_training().updated(config).most_steps(samples)
    most, steps = asked.policy.most_steps(config, local, samples), reply.numbers.get("steps")
    if not isinstance(steps, int | float) or steps < 0.0:
        steps = most
    elif steps > most:
        log_once(TOO_MANY)
        steps = most
    records = getattr(reply.content, "array_records", None) or {}
    arrays = [a for record in records.values() for a in decoded(record).values()]
    return steps, sum(array.nbytes for array in arrays or reply.arrays.values())
