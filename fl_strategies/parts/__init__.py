"""Parts: what works with any algorithm, a file each.

    FedProx(mu=0.1, server_step=Adam(lr=0.01))

in a run-config ``server-step = "adam lr=0.01"``, in commands ``--algorithms fedprox+adam``.
"""

from __future__ import annotations

from fl_strategies.core.settings_text import parse_params
from fl_strategies.core.spelling import unknown
from fl_strategies.parts.adaptive import Adagrad, Adam, Yogi
from fl_strategies.parts.availability import Availability, Bernoulli, Daily, Markov
from fl_strategies.parts.buffered import Buffered
from fl_strategies.parts.clock import Clock
from fl_strategies.parts.combine import Combine
from fl_strategies.parts.compression import BFloat16, Compression, TopK
from fl_strategies.parts.deadline import Deadline
from fl_strategies.parts.exponential import Exponential
from fl_strategies.parts.fedexp import FedExP
from fl_strategies.parts.geometric_median import GeometricMedian
from fl_strategies.parts.high_loss import HighLoss, PowerOfChoice
from fl_strategies.parts.krum import Krum, MultiKrum
from fl_strategies.parts.median import Median, TrimmedMean
from fl_strategies.parts.momentum import Momentum
from fl_strategies.parts.pace import Pace
from fl_strategies.parts.part import Part
from fl_strategies.parts.privacy import Gaussian
from fl_strategies.parts.qsgd import QSGD
from fl_strategies.parts.regularizer import L1, L2, Box, Regularizer
from fl_strategies.parts.selection import BySize, Probabilities, Selection, Uniform
from fl_strategies.parts.server_step import ServerStep
from fl_strategies.parts.trace import Trace
from fl_strategies.parts.virtual_clock import VirtualClock

_SELECTION = (Uniform, BySize, Probabilities, HighLoss, PowerOfChoice)
_COMPRESSION = (TopK, BFloat16, QSGD)
_COMBINE = (Median, TrimmedMean, GeometricMedian, Krum, MultiKrum)
_REGULARIZER = (L1, L2, Box)
_STEP = (Momentum, Adam, Yogi, Adagrad, FedExP)
_CLOCK = (Clock, Exponential)
_AVAILABILITY = (Bernoulli, Markov, Daily, Trace)
_PACE = (Deadline, Buffered)
_ALL: tuple[type[Part], ...] = (
    *(*_SELECTION, *_COMPRESSION, Gaussian, *_COMBINE),
    *(*_REGULARIZER, *_STEP, *_CLOCK, *_AVAILABILITY, *_PACE),
)
PARTS = {part.name: part for part in _ALL}
"""Every part by its name."""
STAGES: dict[str, type[Part]] = {
    "selection": Selection,
    "download": BFloat16,
    "compression": Compression,
    "privacy": Gaussian,
    "combine": Combine,
    "regularizer": Regularizer,
    "server_step": ServerStep,
    "clock": VirtualClock,
    "availability": Availability,
    "pace": Pace,
}
"""The base of the parts that each option takes, in the order of a round."""

__all__ = [
    "PARTS",
    "STAGES",
    "Availability",
    "Combine",
    "Compression",
    "Pace",
    "Part",
    "Regularizer",
    "Selection",
    "ServerStep",
    "VirtualClock",
]
__all__ += ["parse_part", "parts_for", *(part.__name__ for part in PARTS.values())]


def parts_for(stage: str) -> dict[str, type[Part]]:
    """Return the parts that an option takes, by name; all parts for ""."""
    base = STAGES[stage] if stage else Part
    return {name: part for name, part in PARTS.items() if issubclass(part, base)}


def parse_part(text: str, stage: str = "") -> Part:
    """Return the part of a text, ``Adam(lr=0.01)`` of "adam lr=0.01".

    Raises ``ValueError`` for a text that names no part (of this ``stage``), or a value that the
    part does not allow.
    """
    name, _, params = text.strip().partition(" ")
    known = parts_for(stage)
    where = stage.replace("_", "-") or "part"
    if name not in known:
        hint = unknown([name], known)
        raise ValueError(f"{where}: no part {hint}; known: {[*known]}")
    try:
        return known[name](**parse_params(params))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} {name}: {error}") from None
