"""Learning rates that change from step to step within a round.

    cosine          (1 + cos(pi t / T)) / 2
    linear          1 - t / T
    step            factor^floor(t / every), ``step every=10 factor=0.5``

times the learning rate, t = 0, ..., T - 1 being the steps after the warm-up and T their number; a
step more, as a loader without a length may have, has the last one's.
With ``warm-up=w``, after the kind, the first w steps have 1/w, 2/w, ..., 1 of it; ``constant
warm-up=5`` has no more than that.

References: Loshchilov, Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017,
eq. 5; Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, 2.2.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from fl_strategies.core.schedules import check, one_of
from fl_strategies.core.settings_text import parse_params

KINDS = ("constant", "cosine", "linear", "step")
WARM_UP = "warm_up"


def check_schedule(name: str, text: str) -> None:
    """Raise ``ValueError`` unless ``text`` is such a schedule; "" is a constant rate."""
    if not text:
        return
    kind, options = _parsed(text)
    one_of(name, kind, KINDS)
    known = {WARM_UP: 0, **({"every": None, "factor": None} if kind == "step" else {})}
    if wrong := sorted(options.keys() - known.keys()):
        raise ValueError(f"{name}: {kind} has no option {wrong[0]!r}; known: {sorted(known)}")
    if lacking := [n for n in known if n not in options and n != WARM_UP]:
        raise ValueError(f"{name}: {kind} needs {', '.join(lacking)}: step every=10 factor=0.5")
    check(f"{name}: {WARM_UP}", options.get(WARM_UP, 0), low=0, integer=True)
    if kind == "step":
        check(f"{name}: every", options["every"], low=1, integer=True)
        check(f"{name}: factor", options["factor"], above=0.0)


def factor_of(text: str, step: int, steps: int) -> float:
    """Return what the learning rate is multiplied by in ``step``, 0, 1, ..., of ``steps``.

    Examples
    --------
    >>> [factor_of("linear warm-up=2", step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> factor_of("linear", 6, 4)
    0.25
    """
    if not text:
        return 1.0
    kind, options = _parsed(text)
    warm_up = int(options.get(WARM_UP, 0))
    if step < warm_up:
        return (step + 1) / warm_up
    T = max(1, steps - warm_up)
    t = min(step - warm_up, T - 1)
    if kind == "cosine":
        return (1.0 + math.cos(math.pi * t / T)) / 2.0
    if kind == "linear":
        return 1.0 - t / T
    if kind == "step":
        factor, every = float(options["factor"]), int(options["every"])
        return float(factor ** (t // every))
    return 1.0


@functools.lru_cache(maxsize=16)
def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    kind, _, options = text.strip().partition(" ")
    return kind, parse_params(options, "lr-schedule")
