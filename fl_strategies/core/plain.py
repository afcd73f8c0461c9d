"""Plain gradient steps: what some algorithms are defined by, and which local settings make them.

SCAFFOLD's option II and FedSGD follow the gradients of ``sgd`` or ``gd`` and nothing else. The
steps of Per-FedAvg and Per-FedBC are their rules' own, each along the gradient of a model already
adapted: of ``local`` these know ``lr``, ``epochs``, ``random-epochs``, ``steps``, ``random-steps``
and ``batch-size``, where an epoch is as many outer steps as the client has mini-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fl_strategies.core.hyperparameters import Schedule
from fl_strategies.core.schedules import all_among

PLAIN: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "solver": ("sgd", "gd"),
        "solver-params": ("",),
        "momentum": (0.0,),
        "nesterov": (False,),
        "extrapolation": (0.0,),
        "box": (0.0,),
    }
)
"""Local settings under which each step is w <- w - lr g."""

OWN_STEPS: Mapping[str, Sequence[Any]] = MappingProxyType(
    {**PLAIN, "weight-decay": (0.0,), "residual": ()}
)
"""Local settings that an algorithm with gradient steps of its own has no use for, and what they
must be."""


def check_plain_steps(
    settings: Mapping[str, Any] | None, why: str, allowed: Mapping[str, Sequence[Any]] = PLAIN
) -> None:
    """Raise ``ValueError``, which ends in ``why``, if ``settings`` ask for anything else."""
    all_among(settings or {}, allowed, why)


def check_own_steps(algorithm: str, settings: Mapping[str, Any] | None) -> None:
    """Raise ``ValueError`` if ``settings`` ask ``algorithm`` for more than its own steps."""
    check_plain_steps(settings, f"{algorithm} takes plain gradient steps", OWN_STEPS)


def tuned_at(rate: Schedule, local: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``local`` whose ``fine-tune`` steps by the rule's inner ``rate``, if by no other."""
    return {"fine-tune-lr": rate, **(local or {})}
