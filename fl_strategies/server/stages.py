"""The parts at their stages of a round: checks when a strategy is built, and what they compute.

    select -> send -> [clients] -> read -> combine -> aggregate -> regularize -> step

Privacy stands at two of them: it selects, and it combines.
A part's state stands, by its stage, next to the algorithm's state: ``{"server-step": State(...)}``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies.core.layout import Arrays, BufferMean, Layout, few
from fl_strategies.core.records import NOTHING, Round, Upload
from fl_strategies.core.schedules import shown as shortly
from fl_strategies.core.vectors import Vector, weighted_mean
from fl_strategies.messages.codes import CHANGES, CODEC, DOWNLOAD
from fl_strategies.parts import STAGES
from fl_strategies.parts.buffered import Buffered
from fl_strategies.parts.part import Part
from fl_strategies.parts.privacy import Gaussian
from fl_strategies.parts.selection import Selection, Uniform
from fl_strategies.server.composition import Averages
from fl_strategies.server.model import Model
from fl_strategies.server.timing import begun, check_clock, over_selected, with_those_there

if TYPE_CHECKING:
    from fl_strategies.server.algorithm import Algorithm

States = Mapping[str, Any]
STEP = "server-step"
"""The name of the server step's state."""
PRIVACY = "privacy"
"""The name of the privacy part's state."""


class Stepped(NamedTuple):
    """The next model [d], the parts' next states, and numbers of the round."""

    theta: Vector
    states: States
    info: Mapping[str, float] = NOTHING


def parts_of(algorithm: Algorithm) -> dict[str, Part]:
    """Return the parts around the algorithm by stage, in the order of a round."""
    given = {stage: getattr(algorithm, stage) for stage in STAGES}
    return {stage: part for stage, part in given.items() if isinstance(part, Part)}


def check_parts(algorithm: Algorithm) -> None:
    """Raise ``ValueError`` for a part that does not go around the algorithm, or with another."""
    called = type(algorithm).__name__
    if algorithm.selection is not None and (why := Selection.refusal(algorithm, called)):
        raise ValueError(
            f"selection={shortly(algorithm.selection)} does not go with {called}: {why}"
        )
    for stage, part in parts_of(algorithm).items():
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
    check_clock(algorithm, called)
    if algorithm.privacy is not None and (why := _not_private(algorithm)):
        raise ValueError(f"privacy={algorithm.privacy!r} does not go with {why}")


def _not_private(algorithm: Algorithm) -> str:
    """Return which other part or option breaks the guarantee, and why; "" if none does."""
    codec, step = algorithm.compression, algorithm.server_step
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


def described(algorithm: Algorithm) -> str:
    """Return the algorithm's class with its parts, for messages."""
    parts = ", ".join(f"{stage}={part!r}" for stage, part in parts_of(algorithm).items())
    return f"{type(algorithm).__name__} with {parts}" if parts else type(algorithm).__name__


def mean_of(algorithm: Algorithm) -> Averages:
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
) -> Round:
    """Return the round with the clients that are asked; ``samples`` as they are known.

    Those ``at_work`` are not asked, and not connected for whoever selects.
    """
    round = with_those_there(algorithm, state, states, round)
    idle = tuple(client for client in round.connected if client not in at_work)
    round = replace(round, connected=idle)
    if algorithm.privacy is not None:
        return _selected_privately(algorithm, algorithm.privacy, states, round)
    part = algorithm.selection
    size = over_selected(algorithm, len(round.connected), len(at_work))
    if not round.connected or not size:
        return replace(round, asked=())
    if part is None and size != algorithm.asked_of(len(round.connected)):
        part = Uniform()
    if part is None:
        return replace(round, asked=tuple(algorithm.select(state, round)))
    known = {client: samples[client] for client in round.connected if client in samples}
    round = replace(round, samples=known)
    drawn = part.select(round, size) if isinstance(part, Selection) else list(part(round))
    if strangers := sorted({*drawn} - {*round.connected}):
        raise ValueError(f"selection returned {few(strangers)}, which are not connected clients")
    draws = Counter(drawn)
    return replace(round, asked=tuple(sorted(draws)), draws=draws if algorithm.counts_draws else {})


def _selected_privately(
    algorithm: Algorithm, part: Gaussian, states: States, round: Round
) -> Round:
    """Return the round with its sample; raise ``ValueError`` if it exceeds ``max_epsilon``."""
    before, share = states[PRIVACY], algorithm.fraction_train
    asked = part.select(before, round, share, algorithm.asked_of(len(round.connected)))
    round = replace(round, asked=tuple(sorted(asked)))
    if part.max_epsilon is None:
        return round
    if (epsilon := part.epsilon(part.after(before, round, share))) > part.max_epsilon:
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
        told = {CODEC: str(codec), CHANGES: algorithm.uploads_changes}
    if algorithm.download is not None and layout is not None:
        told[DOWNLOAD] = layout.dtype.str
    return told


# ---- combine ------------------------------------------------------------------------------------


def min_replies(algorithm: Algorithm) -> int:
    """Return the fewest uploads of a round that is not skipped, with the parts."""
    if algorithm.privacy is not None:
        return 0
    least = 1 if algorithm.combine is None else algorithm.combine.least
    return max(algorithm.min_replies, least)


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
        return replace(round, mean=algorithm.combine.mean)
    if not algorithm.counts_draws:
        return round
    counts = weights_of(algorithm, round, uploads)

    def mean(weighted: Iterable[tuple[Vector, Any]]) -> Vector:
        return weighted_mean((v, k) for (v, _), k in zip(weighted, counts, strict=True))

    return replace(round, mean=mean)


def merged(algorithm: Algorithm, round: Round, uploads: Sequence[Upload]) -> Arrays:
    """Return the buffers of the next model."""
    if algorithm.combine is None:
        mean = BufferMean()
        for upload in uploads:
            count = (
                float(round.draws[upload.client]) if algorithm.counts_draws else upload.num_examples
            )
            mean.add(upload.buffers, count)
        return mean.value()
    return algorithm.combine.buffers([u.vector for u in uploads], [u.buffers for u in uploads])


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
    step, privacy = algorithm.server_step, algorithm.privacy
    first = {**begun(algorithm, states)}
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
    states, spent = _counted(algorithm, states, round)
    part = algorithm.server_step
    if part is None:
        return Stepped(aggregated, {**states}, spent)
    theta = round.theta
    delta = aggregated - theta
    state = states[STEP] if STEP in states else part.begin(None, theta)
    step, state, info = part.step(
        state, theta, delta, round.number, lambda: _spread(algorithm, round, uploads)
    )
    return Stepped(aggregated + (step - delta), {**states, STEP: state}, {**spent, **info})


def _counted(
    algorithm: Algorithm, states: States, round: Round
) -> tuple[States, Mapping[str, float]]:
    """Return the states after what the round costs of privacy, and epsilon so far."""
    if (part := algorithm.privacy) is None:
        return states, NOTHING
    after = part.after(states[PRIVACY], round, algorithm.fraction_train)
    return {**states, PRIVACY: after}, {"epsilon": part.epsilon(after)}


def shown(algorithm: Algorithm, states: States, arrays: ArrayRecord, layout: Layout) -> ArrayRecord:
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
