"""From a round's uploads to the next global model, without Flower.

    select -> send -> [clients] -> read -> combine -> aggregate -> step   (in ``strategy``)

A round is skipped if too few replies are usable, or if the model would not be finite: its uploads
are not used, and model, server state and ledger stay as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fl_strategies.core.layout import Arrays, Layout, negative_variance
from fl_strategies.core.records import NOTHING, Round, Upload
from fl_strategies.core.schedules import shown
from fl_strategies.core.vectors import finite
from fl_strategies.server.returned import checked_info
from fl_strategies.server.run import fields_of
from fl_strategies.server.stages import (
    States,
    aged,
    as_moved,
    merged,
    stepped,
    weights_of,
    with_mean,
)

if TYPE_CHECKING:
    from fl_strategies.server.algorithm import Algorithm
    from fl_strategies.server.reading import Read


class Outcome(NamedTuple):
    """What a round comes to: the next model, or why there is none, and the next server state.

    ``model`` is None in a skipped round, and ``skipped`` says why. ``info`` holds the numbers that
    the algorithm and its parts report of the round, ``parts`` the parts' states.
    """

    model: Arrays | None
    state: Any
    info: Mapping[str, float] = NOTHING
    skipped: str = ""
    parts: States = {}  # noqa: RUF012  # which nobody changes, and which can be copied


def next_model(
    algorithm: Algorithm,
    state: Any,
    round: Round,
    uploads: Sequence[Upload],
    *,
    fault: str = "",
    parts: States = NOTHING,
) -> Outcome:
    """Return the outcome of ``round`` for its usable ``uploads``, ascending by client.

    ``fault`` is a reason to skip the round that the uploads do not show, ``parts`` are the parts'
    states. Arguments stay as they are.
    """
    assert round.layout is not None
    uploads, ages = aged(algorithm, round, uploads)
    needed = algorithm.replies_needed(round)
    if len(uploads) < needed:
        fault = f"{len(uploads)} usable replies, at least {needed} needed"
    if not fault:
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow is found just below
            around = with_mean(algorithm, parts, as_moved(algorithm, round), uploads)
            aggregated, after, info = _aggregated(algorithm, state, around, uploads)
            if around.theta is not round.theta:
                aggregated = round.theta + (aggregated - around.theta)
            theta, kept, numbers = stepped(algorithm, parts, round, aggregated, uploads)
            model = round.layout.unpack(np.asarray(theta), merged(algorithm, round, uploads))
        if not (fault := _unusable(model, after, round.layout)):
            return Outcome(model, after, {**info, **numbers, **ages}, parts=kept)
    after, info = algorithm.skipped(state, round, uploads)
    info = checked_info(f"{type(algorithm).__name__}.skipped", info, algorithm.scalar_bounds)
    return Outcome(None, after, info, skipped=fault, parts={**parts})


def _aggregated(
    algorithm: Algorithm, state: Any, round: Round, uploads: Sequence[Upload]
) -> tuple[Any, Any, Mapping[str, float]]:
    """Return what ``aggregate`` does; raise ``TypeError`` or ``ValueError`` for another thing.

    Its arguments cannot be written into.
    """
    theta = round.theta.view()
    theta.flags.writeable = False
    for value in fields_of(state).values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    made: Any = algorithm.aggregate(state, replace(round, theta=theta), uploads)
    name, shape = f"{type(algorithm).__name__}.aggregate", np.shape(round.theta)
    if not isinstance(made, tuple) or len(made) != 3:
        raise TypeError(f"{name} must return (theta, state, info), got {shown(made)}")
    if np.shape(made[0]) != shape:
        raise ValueError(f"{name} must return a theta [{shape[0]}], got {np.shape(made[0])}")
    if type(made[1]) is not type(state):
        kind = type(state).__name__
        raise TypeError(f"{name} must return a {kind} as its state, got {shown(made[1])}")
    return made[0], made[1], checked_info(name, made[2], algorithm.scalar_bounds)


def _unusable(model: Arrays, state: Any, layout: Layout) -> str:
    """Return why nobody can use the aggregated ``model`` and ``state``, or "" if they can be."""
    if not finite(model.values()):
        return "the aggregated model is not finite"
    if not finite(v for v in fields_of(state).values() if isinstance(v, np.ndarray)):
        return "the server's next state is not finite"
    wrong = negative_variance(model, layout.buffers)
    return f"the aggregated model cannot be used: {wrong}" if wrong else ""


def shares(
    algorithm: Algorithm, read: Read
) -> tuple[dict[int, dict[str, float]], dict[str, float]]:
    """Return clients' numbers with each one's share of the samples and of the next global model.

    Also returns both shares of the clients with the fewest and the most samples, as metrics.
    """
    rows, given = read.rows, weights_of(algorithm, read.round, read.uploads)
    weights = {u.client: w for u, w in zip(read.uploads, given, strict=True)}
    total, samples = sum(weights.values()), sum(row["samples"] for row in rows.values())
    shared = {
        client: {
            **row,
            "weight-share": weights[client] / total if total else 1 / len(rows),
            "data-share": row["samples"] / samples,
        }
        for client, row in rows.items()
    }
    if not rows:
        return {}, {}
    by_size = sorted(shared.values(), key=lambda row: row["samples"])
    ends = (("smallest", by_size[0]), ("largest", by_size[-1]))
    return shared, {
        f"{name}-{end}": row[name] for name in ("weight-share", "data-share") for end, row in ends
    }
