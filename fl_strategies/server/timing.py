"""Virtual time of a phase: whose reply counts, and how long the phase lasts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from fl_strategies.core.log import log_once
from fl_strategies.core.records import BadReply, Reply, Upload
from fl_strategies.messages.wire import MAX_SAMPLES, Content, decoded
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
        ends[client], leaves = ends_after(asked.of(client), client, sifted.answers.get(client))
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


def ends_after(asked: Asked, client: int, answer: Content | BadReply | None) -> tuple[float, bool]:
    """Return the seconds from a client's request to its answer, and whether it leaves before.

    Without content (an error, or no answer) the client did no work.
    """
    clock = asked.policy.clock
    assert clock is not None
    steps, up = work_of(asked, client, answer) if isinstance(answer, Content) else (0.0, 0)
    about = asked.round.seed, asked.round.number, client
    seconds = clock.seconds(*about, steps, asked.bytes_of.get(client, 0), up)
    share = clock.drops_out(*about)
    return (seconds, False) if share is None else (seconds * share, True)


def work_of(asked: Asked, client: int, content: Content) -> tuple[float, int]:
    """Return the local steps that a client reports, at most those of its request, and its bytes.

    A client whose host folds its upload would send a whole model.
    """
    policy, config = asked.policy, asked.configs.get(client, {})
    numbers = next(iter(content.metric_records.values()), {})
    samples, most = numbers.get(policy.expected.weighted_by), policy.expected.max_samples
    if not isinstance(samples, int) or not 1 <= samples <= (most or MAX_SAMPLES):
        samples = 1
    local = default_training().updated(config).most_steps(samples)
    allowed, steps = policy.most_steps(config, local, samples), numbers.get("steps")
    if not isinstance(steps, int | float) or not steps >= 0.0:
        steps = allowed
    elif steps > allowed:
        log_once(TOO_MANY)
        steps = allowed
    if content.fold is not None:
        return steps, policy.wire.nbytes
    with suppress(BadReply):
        records = content.array_records.values()
        return steps, sum(a.nbytes for record in records for a in decoded(record).values())
    return steps, 0
