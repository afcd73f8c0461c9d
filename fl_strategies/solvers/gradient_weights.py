"""With what weights gradient steps add up gradients.

From w, steps of SGD with momentum m, learning rate lr and a pull r towards the start
reach

    w - lr sum_k a_k g_k,

where g_k is the gradient of step k and the a_k depend on the steps alone. Their sum a is how far
the steps go on a gradient of 1, in units of lr:

    u = 1 - lr r a,    b <- m b + u,    a <- a + b, with Nesterov's momentum a + u + m b      (1)

So (start - w) / (lr a) is a mean of the gradients: SCAFFOLD's control variate. FedNova divides
clients' changes by a. Weight decay is a term of f.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fl_strategies.core.schedules import all_among
from fl_strategies.core.stacks import choose, is_nought, repeated
from fl_strategies.core.vectors import Number
from fl_strategies.solvers.own_steps import PLAIN

STEPS: Mapping[str, Sequence[Any]] = MappingProxyType(
    {name: PLAIN[name] for name in ("solver", "solver-params", "extrapolation", "box")}
)
"""Local settings with which (1) holds."""


def check_weights_known(settings: Mapping[str, Any] | None, why: str) -> None:
    """Raise ``ValueError``, which ends in ``why``, for local settings without (1)."""
    all_among(settings or {}, STEPS, why)


class Weights:
    """Sums up (1), step by step, for learning rates that may change; ``pull`` is lr r."""

    def __init__(self, momentum: float, nesterov: bool, pull: float) -> None:
        self._momentum, self._nesterov, self._pull = momentum, nesterov, pull
        self.sum, self._b = 0.0, 0.0

    def step(self, factor: float = 1.0) -> None:
        """Count a step with ``factor`` times lr."""
        u = 1.0 - self._pull * self.sum
        self._b = self._momentum * self._b + u
        self.sum += factor * (u + self._momentum * self._b if self._nesterov else self._b)


def weight_of(
    steps: Number, *, momentum: float = 0.0, nesterov: bool = False, pull: Number = 0.0
) -> Number:
    """Return a of (1) after ``steps`` steps; ``pull`` is lr r."""
    first = 2 if nesterov else 1
    ones = momentum == 1.0
    rest = choose(ones, 1.0, 1.0 - momentum)
    missing = momentum**first * (1.0 - momentum**steps) / rest
    free = choose(ones, steps * (steps + 2 * first - 1) / 2, (steps - missing) / rest)
    if is_nought(pull):
        return free

    def step(a: Number, b: Number) -> tuple[Number, Number]:
        u = 1.0 - pull * a
        b = momentum * b + u
        return a + (u + momentum * b if nesterov else b), b

    # step by step, as a closed form loses all digits of a small pull
    nought = 0.0 * pull + 0.0 * steps
    return choose(pull == 0.0, free, repeated(steps, step, nought, nought)[0])
