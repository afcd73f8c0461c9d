"""The parts at their stages of a round: checks when a strategy is built, and what they compute.

    select -> send -> [clients] -> read -> combine -> aggregate -> regularize -> step

Privacy stands at two of them: it selects, and it combines.
A part's state stands, by its stage, next to the algorithm's state: ``{"server-step": State(...)}``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies.core.layout import Arrays, BufferMean, Layout, few
from fl_strategies.core.records import NOTHING, Round, Upload
from fl_strategies.core.schedules import shown as shortly
from fl_strategies.core.vectors import Vector, weighted_mean
from fl_strategies.messages.codes import CODEC, DOWNLOAD, asked_for
from fl_strategies.messages.wire import MAX_SAMPLES
from fl_strategies.parts.buffered import Buffered
from fl_strategies.parts.deadline import Deadline
from fl_strategies.parts.privacy import Gaussian
from fl_strategies.parts.selection import Selection, Uniform
from fl_strategies.server.algorithm import Algorithm
from fl_strategies.server.composition import Averages
from fl_strategies.server.model import Model

States = Mapping[str, Any]
STEP = "server-step"
"""The name of the server step's state."""
PRIVACY = "privacy"
"""The name of the privacy part's state."""
WEIGHTS = ("staleness", "power", "grace", "mixing")
"""Hyperparameters of a buffered pace that are of models alone."""
CLOCK, PACE = "clock", "pace"
"""The names of the clock's and of a buffered pace's state."""
SECONDS = "virtual-seconds"


class State(NamedTuple):
    """The virtual seconds since the beginning of the run."""

    seconds: float = 0.0


class AtWork(NamedTuple):
    """By round, the clients that were asked in it and are at work with since when, and their model.

    A run that resumes from a checkpoint asks them again, and by the round's random streams gets
    what it would have got.
    """

    unfinished: Mapping[int, Sequence[Any]] = {}  # which nobody changes


class Stepped(NamedTuple):
    """The next model [d], the parts' next states, and numbers of the round."""

    theta: Vector
    states: States
    info: Mapping[str, float] = NOTHING


def check_parts(algorithm: Algorithm) -> None:
    """Raise ``ValueError`` for a part that does not work with the algorithm or another part."""
    called = type(algorithm).__name__
    if algorithm.selection is not None and (why := Selection.refusal(algorithm, called)):
        raise ValueError(
            f"selection={shortly(algorithm.selection)} does not go with {called}: {why}"
        )
    for stage, part in algorithm.around.items():
        if why := part.refusal(algorithm, called, stage):
            raise ValueError(f"{stage}={part!r} does not go with {called}: {why}")
    step, combine = algorithm.server_step, algorithm.combine
    if step is not None and combine is not None and step.needs_distances:
        raise ValueError(
            f"server_step={step!r} does not go with combine={combine!r}: its formula is that of the"
            " weighted mean, and an attacker's distance would enter it; use Momentum or Adam"
        )
    if combine is not None and algorithm.counts_draws:
        raise ValueError(
            f"selection={algorithm.selection!r} does not go with combine={combine!r}, for which"
            " each upload counts alike; use Uniform or Probabilities"
        )
    _check_clock(algorithm, called)
    if algorithm.privacy is not None and (why := _not_private(algorithm)):
        raise ValueError(f"privacy={algorithm.privacy!r} does not go with {why}")


def _not_private(algorithm: Algorithm) -> str:
    """Return which other part or option breaks the guarantee, and why; "" if none does."""
    codec, step, part = algorithm.compression, algorithm.server_step, algorithm.privacy
    if algorithm.selection is not None:
        return f"selection={shortly(algorithm.selection)}: epsilon counts on the part's `sampling`"
    if algorithm.availability is not None:
        return f"availability={algorithm.availability!r}: epsilon counts on all being there"
    if algorithm.combine is not None:
        return f"combine={algorithm.combine!r}: the noise is that of a sum; use one of the two"
    if codec is not None and codec.feedback:
        return (
            f"compression={codec!r}: what is clipped off would be neither used nor sent later; use"
            " QSGD, which remembers nothing"
        )
    if step is not None and step.needs_distances:
        return f"server_step={step!r}, which reads uploads without noise; use Momentum or Adam"
    if algorithm.min_replies > 1:
        return (
            f"min_replies={algorithm.min_replies}: a skipped round would tell how many took part;"
            " leave it out"
        )
    if algorithm.min_train_nodes > 1 and part is not None and part.sampling == "poisson":
        return (
            f"min_train_nodes={algorithm.min_train_nodes}: each client is asked by itself; use"
            ' min_available_nodes, or sampling="fixed"'
        )
    return ""


def _check_clock(algorithm: Algorithm, called: str) -> None:
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
    overtakes = isinstance(pace, Buffered) or (isinstance(pace, Deadline) and pace.cut)
    if algorithm.clock is not None and algorithm.clock.shared and overtakes:
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


def check_layout(algorithm: Algorithm, layout: Layout) -> None:
    """Raise ``ValueError`` for a model that the parts do not go with."""
    if algorithm.privacy is not None and layout.untrained:
        raise ValueError(
            f"privacy={algorithm.privacy!r} does not go with buffers {few(layout.untrained)}, which"
            " would be averaged without noise: use a model without, with GroupNorm instead of"
            " BatchNorm"
        )
    types = sorted({str(layout.dtypes[name]) for name in layout.trainable})
    if algorithm.download is not None and len(types) > 1:
        raise ValueError(
            f"download={algorithm.download!r} does not go with trained arrays of the types {types}:"
            " use a model whose trained arrays have one"
        )


def mean_with_parts(algorithm: Algorithm) -> Averages:
    """Return what the next model is the mean of, as ``Algorithm.mean_of``, with the parts."""
    step = algorithm.server_step
    if algorithm.needs_each_upload or algorithm.download is not None:
        return ""  # nobody else may clip uploads, add noise to them or add them up under masks
    if step is None or not algorithm.mean_of:
        return algorithm.mean_of
    # a step scales the noise that a wrapper adds; masks hide distances
    return "" if step.needs_distances else "changes"


# ---- select -------------------------------------------------------------------------------------


def selected(
    algorithm: Algorithm,
    state: Any,
    states: States,
    round: Round,
    samples: Mapping[int, int],
    at_work: Collection[int] = (),
    size: int | None = None,
) -> Round:
    """Return the round with the clients that are asked; ``samples`` as they are known.

    Those ``at_work`` are not asked, and not connected for whoever selects. ``size`` is the most
    that are asked, if that is not the algorithm's to say.
    """
    round = _with_those_there(algorithm, state, states, round)
    idle = tuple(client for client in round.connected if client not in at_work)
    round = replace(round, connected=idle)
    if algorithm.privacy is not None:
        return _selected_privately(algorithm, algorithm.privacy, states, round)
    part = algorithm.selection
    if size is None:
        size = _over_selected(algorithm, len(round.connected), len(at_work))
    size = min(size, len(round.connected))
    if not round.connected or not size:
        return replace(round, asked=())
    if part is None and size != algorithm.asked_of(len(round.connected)):
        part = Uniform()
    if part is None:
        return replace(round, asked=tuple(algorithm.select(state, round)))
    most = algorithm.max_samples or MAX_SAMPLES
    known = {c: samples[c] for c in round.connected if samples.get(c, math.inf) <= most}
    round = replace(round, samples=known)
    drawn = part.select(round, size) if isinstance(part, Selection) else list(part(round))
    if strangers := sorted({*drawn} - {*round.connected}):
        raise ValueError(f"selection returned {few(strangers)}, which are not connected clients")
    draws = Counter(drawn)
    return replace(round, asked=tuple(sorted(draws)), draws=draws if algorithm.counts_draws else {})


def _with_those_there(algorithm: Algorithm, state: Any, states: States, round: Round) -> Round:
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


def wanted_replies(algorithm: Algorithm, round: Round, busy: int = 0) -> int:
    """Return how many replies a round waits for, while ``busy`` clients are at work."""
    pace, there = algorithm.pace, len(round.connected) + busy
    if not isinstance(pace, Deadline) or pace.over_select == 1.0:
        return len(round.asked)
    return min(len(round.asked), algorithm.asked_of(there))


def _over_selected(algorithm: Algorithm, there: int, busy: int) -> int:
    """Return how many are asked of the clients that are ``there``, while ``busy`` are at work."""
    size, pace = algorithm.asked_of(there + busy), algorithm.pace
    return pace.asked(size, there) if isinstance(pace, Deadline) else size


def _selected_privately(
    algorithm: Algorithm, part: Gaussian, states: States, round: Round
) -> Round:
    """Return the round with its sample; raise ``ValueError`` if it exceeds ``max_epsilon``."""
    before, share = states[PRIVACY], algorithm.fraction_train
    asked = part.select(before, round, share, algorithm.asked_of(len(round.connected)))
    round = replace(round, asked=tuple(sorted(asked)))
    if part.max_epsilon is None:
        return round
    if (epsilon := part.epsilon(part.counted(before, round, share))) > part.max_epsilon:
        raise ValueError(
            f"with round {round.number} epsilon would be {epsilon:.3g}, and max_epsilon is"
            f" {part.max_epsilon:g}: ask fewer clients, or take a larger noise"
        )
    return round


def is_spent(algorithm: Algorithm, states: States) -> bool:
    """Return whether the run ends, because another round would exceed ``max_epsilon``."""
    return algorithm.privacy is not None and algorithm.privacy.is_spent(states[PRIVACY])


def requested(algorithm: Algorithm, layout: Layout | None) -> dict[str, Any]:
    """Return what every client is told of the parts."""
    codec = algorithm.compression
    told: dict[str, Any] = {}
    if codec is not None:
        told = {CODEC: asked_for(codec, changes=algorithm.uploads_changes)}
    if algorithm.download is not None and layout is not None:
        told[DOWNLOAD] = layout.dtype.str
    return told


def step_limits(
    algorithm: Algorithm, round: Round, down: Mapping[int, int], up: int
) -> Iterator[tuple[int, int]]:
    """Yield the clients whose steps are limited to the deadline, and to how many."""
    clock, pace = algorithm.clock, algorithm.pace
    if clock is None or not isinstance(pace, Deadline):
        return
    for client, size in down.items():
        if steps := pace.steps(clock, round.seed, round.number, client, size, up):
            yield client, steps


# ---- combine ------------------------------------------------------------------------------------


def as_moved(algorithm: Algorithm, round: Round) -> Round:
    """Return the round from whose theta the uploaded models were moved."""
    return replace(round, theta=round.received) if algorithm.moves_received else round


def aged(
    algorithm: Algorithm, round: Round, uploads: Sequence[Upload]
) -> tuple[Sequence[Upload], Mapping[str, float]]:
    """Return the uploads as they count at their age, and numbers of their ages."""
    pace = algorithm.pace
    if not isinstance(pace, Buffered) or not uploads:
        return uploads, NOTHING
    ages = [round.number - upload.round for upload in uploads]
    numbers = {"reply-age": float(np.mean(ages)), "oldest-reply": float(max(ages))}
    if algorithm.averages == "models":
        uploads = [pace.aged(round, upload) for upload in uploads]
    return uploads, numbers


def with_mean(
    algorithm: Algorithm, states: States, round: Round, uploads: Sequence[Upload]
) -> Round:
    """Return the round with the ``mean`` of the ``uploads`` that the parts make it."""
    if (part := algorithm.privacy) is not None:
        state, share = states[PRIVACY], algorithm.fraction_train
        return replace(round, mean=lambda ws: part.mean(state, round, (w for w, _ in ws), share))
    if algorithm.combine is not None:
        return replace(round, mean=algorithm.combine.after(round.rejected).mean)
    if not algorithm.counts_draws:
        return round
    counts = weights_of(algorithm, round, uploads)

    def mean(weighted: Iterable[tuple[Vector, Any]]) -> Vector:
        return weighted_mean((v, k) for (v, _), k in zip(weighted, counts, strict=True))

    return replace(round, mean=mean)


def merged(algorithm: Algorithm, round: Round, uploads: Sequence[Upload]) -> Arrays:
    """Return the buffers of the next model."""
    if round.layout is None or not round.layout.buffers:
        return {}
    if algorithm.combine is not None:
        return algorithm.combine.buffers([upload.buffers for upload in uploads])
    mean, drawn = BufferMean(), algorithm.counts_draws
    for upload in uploads:
        mean.add(upload.buffers, round.draws[upload.client] if drawn else upload.num_examples)
    return mean.value()


def weights_of(algorithm: Algorithm, round: Round, uploads: Sequence[Upload]) -> list[float]:
    """Return the weight of each upload; a combining part has equal ones, some count draws."""
    if algorithm.counts_draws:
        return [float(round.draws[upload.client]) for upload in uploads]
    if algorithm.combine is not None:
        return [1.0] * len(uploads)
    return algorithm.weights_of(round, uploads)


# ---- step ---------------------------------------------------------------------------------------


def begin(algorithm: Algorithm, states: States, theta: Vector) -> States:
    """Return the parts' states at the beginning of a ``start`` with the model ``theta`` [d]."""
    clock, step, privacy = algorithm.clock, algorithm.server_step, algorithm.privacy
    first: dict[str, Any] = {}
    if clock is not None:
        clock.open()
        if not algorithm.counts_time:
            first[CLOCK] = states.get(CLOCK, State())
    if isinstance(algorithm.pace, Buffered):
        first[PACE] = states.get(PACE, AtWork())
    if privacy is not None:
        first[PRIVACY] = privacy.begin(states.get(PRIVACY))
    if step is not None:
        first[STEP] = step.begin(states.get(STEP), theta)
    return first


def stepped(
    algorithm: Algorithm,
    states: States,
    round: Round,
    aggregated: Vector,
    uploads: Sequence[Upload],
) -> Stepped:
    """Return the next model from the one that the rule ``aggregated`` [d]."""
    if algorithm.regularizer is not None:
        rate = algorithm.proximal_rate(round.number)
        assert rate is not None
        aggregated = algorithm.regularizer.prox(aggregated, rate)
    spent: dict[str, float] = {}
    if (private := algorithm.privacy) is not None:
        share, before = algorithm.fraction_train, states[PRIVACY]
        changes = (upload.vector - round.received for upload in uploads)
        after = private.moved(private.counted(before, round, share), round, changes, share)
        states, spent = {**states, PRIVACY: after}, {"epsilon": private.epsilon(after)}
        if private.quantile is not None:
            spent["clip"] = private.bound(before)
    part = algorithm.server_step
    if part is None:
        return Stepped(aggregated, {**states}, spent)
    theta = round.theta
    delta = aggregated - theta
    state = states[STEP] if STEP in states else part.begin(None, theta)
    step, state, info = part.step(
        state, theta, delta, round.number, lambda: _spread(algorithm, round, uploads)
    )
    moved = np.where(step == delta, aggregated, theta + step)
    return Stepped(moved, {**states, STEP: state}, {**spent, **info})


def evaluated_model(
    algorithm: Algorithm, states: States, arrays: ArrayRecord, layout: Layout
) -> ArrayRecord:
    """Return the model that is tested, evaluated and returned when ``arrays`` train next."""
    part = algorithm.server_step
    if part is None or not part.shows_another:
        return arrays
    model = Model.of(arrays, layout)
    return model.with_vector(part.shown(states[STEP], model.theta), {}).record


def _spread(algorithm: Algorithm, round: Round, uploads: Sequence[Upload]) -> float:
    """Return sum_i p_i ||w_i - theta||^2 of theta as received; the p_i sum to 1."""
    weights = np.asarray(weights_of(algorithm, round, uploads))
    squares = [_distance2(upload, round.received) for upload in uploads]
    return float(weights @ squares / weights.sum())


def _distance2(upload: Upload, theta: Vector) -> float:
    if upload.distance2 is not None:
        return upload.distance2
    moved = upload.vector - theta
    return float(moved @ moved)


def passed(states: States, seconds: float) -> tuple[States, dict[str, float]]:
    """Return the states after so many virtual seconds more, and the round's metric."""
    if CLOCK not in states:
        return states, {}
    now = states[CLOCK].seconds + seconds
    return {**states, CLOCK: State(now)}, {SECONDS: now}
