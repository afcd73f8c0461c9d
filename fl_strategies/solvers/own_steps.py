"""Algorithms with steps of their own, and the local settings that these steps use.

SCAFFOLD's option II and FedSGD are defined for the gradient steps of ``sgd`` or ``gd`` only. The
rules of Per-FedAvg and Per-FedBC take their own steps, each along the gradient of an adapted model.
Of ``local`` they use ``lr``, ``epochs``, ``random-epochs``, ``steps``, ``random-steps`` and
``batch-size``; an epoch has one outer step per mini-batch of the client. FedPDVR's hyperparameters
set its steps: of ``local`` it uses only what ``fine-tune`` needs, which measures models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fl_strategies.core.hyperparameters import Schedule
from fl_strategies.core.schedules import all_among
from fl_strategies.solvers.local import default_training

PLAIN: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "solver": ("sgd", "gd"),
        "solver-params": ("",),
        "momentum": (0.0,),
        "nesterov": (False,),
        "lr-schedule": ("",),
        "max-grad-norm": (0.0,),
        "extrapolation": (0.0,),
        "box": (0.0,),
    }
)
"""Local settings with which each step is w <- w - lr g."""

OWN_STEPS: Mapping[str, Sequence[Any]] = MappingProxyType(
    {**PLAIN, "weight-decay": (0.0,), "residual": (), "sam": (0.0,), "variance-reduction": ("off",)}
)
"""Local settings that an algorithm with its own gradient steps does not use, and the values they
must have."""


FINE_TUNING = ("fine-tune", "fine-tune-lr", "fine-tune-epochs", "lr", "batch-size")
"""The local settings that ``fine-tune`` reads."""


def check_plain_steps(
    settings: Mapping[str, Any] | None, why: str, allowed: Mapping[str, Sequence[Any]] = PLAIN
) -> None:
    """Raise ``ValueError``, which ends in ``why``, unless ``settings`` ask for plain steps."""
    all_among(settings or {}, allowed, why)


def check_own_steps(algorithm: str, settings: Mapping[str, Any] | None) -> None:
    """Raise ``ValueError`` if ``settings`` ask ``algorithm`` for more than its own steps.

    Examples
    --------
    >>> check_own_steps("fedsgd", {"lr": 0.1, "momentum": 0.5})
    Traceback (most recent call last):
    ValueError: momentum must be 0.0, got 0.5: fedsgd takes plain gradient steps
    """
    check_plain_steps(settings, f"{algorithm} takes plain gradient steps", OWN_STEPS)


def not_for_fine_tuning(settings: Mapping[str, Any]) -> list[str]:
    """Return which of ``settings``, spelt as in requests, say how to train, not how to measure."""
    tunes = settings.get("fine-tune", "off") != "off"
    used = FINE_TUNING if tunes else ("fine-tune",)
    return sorted(settings.keys() & default_training().settings.keys() - set(used))


def check_only_fine_tuning(algorithm: str, settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``settings`` tell ``algorithm``, which runs no solver, how to train.

    ``settings`` are spelt as in requests.
    """
    if unused := not_for_fine_tuning(settings):
        texts = ", ".join(f"{name} = {settings[name]!r}" for name in unused)
        raise ValueError(f"{algorithm} has no use for {texts}: its hyperparameters set its steps")


def tuned_at(rate: Schedule, local: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``local``; the default of ``fine-tune-lr`` becomes ``rate``, the rule's inner rate."""
    return {"fine-tune-lr": rate, **(local or {})}
