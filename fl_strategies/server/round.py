"""From a round's uploads to the next global model, without Flower.

    select -> send -> [clients] -> read -> combine -> aggregate -> step   (in ``strategy``)

A round is skipped if too few replies are usable, or if the model would not be finite: its uploads
are not used, and model, server state and ledger stay as they were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fl_strategies.core.layout import Arrays, Layout, negative_variance
from fl_strategies.core.metric_names import (
    BUSY,
    EVALUATED,
    FOREIGN,
    REPORTED,
    SERVER,
    SPREAD,
    TESTED,
)
from fl_strategies.core.records import NOTHING, Mean, Round, Upload
from fl_strategies.core.schedules import plain, shown
from fl_strategies.core.vectors import Pieces, Vector, finite, weighted_mean
from fl_strategies.server.algorithm import Algorithm
from fl_strategies.server.checkpoints import fields_of
from fl_strategies.server.stages import (
    STEP,
    States,
    aged,
    as_moved,
    merged,
    stepped,
    with_mean,
)

WORK = ("train-loss", "train-accuracy", "residual", "steps", "epochs")
"""What clients report of their training."""
TAKEN = (SERVER - REPORTED).union(WORK, (f"{n}{end}" for n in WORK for end in SPREAD))
"""Names of others' numbers of a round; virtual seconds may be the algorithm's own."""


class Outcome(NamedTuple):
    """What a round gives: the next model, or why there is none, and the next server state.

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
        if not (fault := _unusable(model, [after, kept.get(STEP)], round.layout)):
            return Outcome(model, after, {**info, **numbers, **ages}, parts=kept)
    after, info = algorithm.skipped(state, round, uploads)
    info = checked_info(f"{type(algorithm).__name__}.skipped", info, algorithm.scalar_bounds)
    return Outcome(None, after, info, skipped=fault, parts={**parts})


@dataclass
class Heard:
    """A mean that knows whether it was called."""

    mean: Mean
    called: bool = False

    def __call__(self, weighted: Iterable[tuple[Vector, Any]]) -> Vector:
        self.called = True
        return self.mean(weighted)


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
    name, shape = f"{type(algorithm).__name__}.aggregate", np.shape(round.theta)
    mean = round.mean if round.mean is weighted_mean else Heard(round.mean)
    made: Any = algorithm.aggregate(state, replace(round, theta=theta, mean=mean), uploads)
    if isinstance(mean, Heard) and not mean.called:
        what = algorithm.privacy or algorithm.combine or algorithm.selection
        raise ValueError(f"{name} must average by round.mean, in which {what!r} acts")
    if not isinstance(made, tuple) or len(made) != 3:
        raise TypeError(f"{name} must return (theta, state, info), got {shown(made)}")
    if np.shape(made[0]) != shape:
        raise ValueError(f"{name} must return a theta [{shape[0]}], got {np.shape(made[0])}")
    if type(made[1]) is not type(state):
        kind = type(state).__name__
        raise TypeError(f"{name} must return a {kind} as its state, got {shown(made[1])}")
    return made[0], made[1], checked_info(name, made[2], algorithm.scalar_bounds)


def _unusable(model: Arrays, states: Iterable[Any], layout: Layout) -> str:
    """Return why nobody can use the aggregated ``model`` and ``states``, or "" if they can be."""
    if not finite(model.values()):
        return "the aggregated model is not finite"
    kept = (value for state in states for value in fields_of(state).values())
    if not finite(value for value in kept if isinstance(value, np.ndarray)):
        return "the server's next state is not finite"
    wrong = negative_variance(model, layout.buffers)
    return f"the aggregated model cannot be used: {wrong}" if wrong else ""


def shares(
    rows: Mapping[int, Mapping[str, float]], weights: Mapping[int, float]
) -> tuple[dict[int, dict[str, float]], dict[str, float]]:
    """Return clients' numbers with each one's share of the samples and of the next global model.

    Also returns both shares of the clients with the fewest and the most samples, as metrics.
    """
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


# ---- what hooks return --------------------------------------------------------------------------


def checked_vector(hook: str, what: str, value: object, size: int) -> npt.NDArray[Any]:
    """Return ``value``, which ``hook`` returned as ``what``, as an array.

    Raises ``TypeError`` or ``ValueError`` for anything but a finite vector [size].
    """
    must = f"{hook} must return {what} [{size}]"
    if not isinstance(value, np.ndarray | Pieces):
        raise TypeError(f"{must}, a NumPy array, got {shown(value)}")
    if value.shape != (size,):
        raise ValueError(f"{must}, got {value.shape}")
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{must} of real numbers, got the type {array.dtype}")
    if not finite([array]):
        where = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ValueError(f"{must} of finite numbers, got {array[where]} at {where}")
    return array


def checked_vectors(hook: str, made: object, names: Sequence[str], size: int) -> list[Vector]:
    """Return the vectors [size] that ``hook`` returned by name, in the order of ``names``.

    Raises ``TypeError`` or ``ValueError`` for other names, and as :func:`checked_vector`.
    """
    if not isinstance(made, Mapping):
        raise TypeError(f"{hook} must return a vector for each of {[*names]}, got {shown(made)}")
    if made.keys() != {*names}:
        raise ValueError(f"{hook} must return vectors of the names {[*names]}, got {[*made]}")
    return [checked_vector(hook, repr(name), made[name], size) for name in names]


def checked_info(hook: str, info: object, scalars: Collection[str]) -> dict[str, float]:
    """Return the numbers of a round that ``hook`` returned, by name.

    ``scalars`` are clients' own. Raises ``TypeError`` or ``ValueError`` for what is no number, and
    for a name that clients or the server report already.
    """
    if not isinstance(info, Mapping):
        raise TypeError(f"{hook} must return a dict of numbers as info, got {shown(info)}")
    numbers = {name: plain(value) for name, value in info.items()}
    for name, number in numbers.items():
        if not isinstance(name, str) or not isinstance(number, int | float):
            told = f"{hook} must return numbers by name as info"
            raise TypeError(f"{told}, got {shown(info[name])} as {name!r:.60}")
    prefixes = (TESTED, BUSY, FOREIGN, *EVALUATED)
    if taken := [n for n in numbers if n in TAKEN or n in scalars or n.startswith(prefixes)]:
        raise ValueError(f"{hook} must not report {taken[:3]}: clients or the server report these")
    return numbers
