"""What Per-FedAvg and Per-FedBC share: local steps along gradients of models already adapted.

No solver of the subproblem is at work there but the rule's own gradient steps, each on a fresh
mini-batch. Of ``local`` they know ``lr``, ``epochs``, ``random-epochs``, ``steps``,
``random-steps`` and ``batch-size``, where an epoch is as many outer steps as the client has
mini-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from fl_strategies.schedules import Knob, one_of
from fl_strategies.subproblem import Vector

Gradient: TypeAlias = Callable[[Vector], Vector]
"""``gradient(u)`` returns f_i's gradient at u on the next mini-batch, as a new vector."""

HessianProduct: TypeAlias = Callable[[Vector, Vector], Vector]
"""``product(u, v)`` returns f_i's Hessian at u times v on the next mini-batch, as a new vector."""

_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "solver": ("sgd", "gd"),
    "solver-params": ("",),
    "momentum": (0,),
    "weight-decay": (0,),
    "residual": (-1,),
    "extrapolation": (0,),
    "box": (0,),
}


def tune_at(rate: Knob, local: dict[str, Any]) -> None:
    """Have ``fine-tune`` of ``local`` step by the rule's inner ``rate``, if no other is set."""
    if local.get("fine-tune-lr", -1.0) == -1.0:
        local["fine-tune-lr"] = rate


def check_plain_steps(algorithm: str, local: Mapping[str, Any] | None) -> None:
    """Raise ``ValueError`` if ``local`` asks for anything but plain gradient steps."""
    for name, plain in _PLAIN.items():
        value = (local or {}).get(name, plain[0])
        one_of(f"{algorithm} takes plain gradient steps: {name}", value, plain)
