"""What is measured of outputs: how many samples are right, and a user's own metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fl_strategies.core.schedules import require

IGNORED = -100
"""The label that PyTorch's losses leave out by default."""
OURS = ("", "loss", "accuracy")
"""What no metric of a user's may be called."""


class Hits(NamedTuple):
    """How many samples are right, and how many count: numbers, or scalars on the device."""

    right: Any
    counted: Any


def scores_of(outputs: Any) -> Tensor | None:
    """Return what classes are read of: outputs that are one tensor, or the ``logits`` of others."""
    scores = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    return scores if isinstance(scores, Tensor) else None


def hits(scores: Tensor, targets: Any, ignored: int | None = None) -> Hits:
    """Return how many samples are right, and how many count, by :func:`right_of_each`.

    ``ignored`` is -100 by default.
    """
    ignored = IGNORED if ignored is None else ignored
    if not of_classes(scores, targets):
        return Hits(0, 0)
    right = right_of_each(scores, targets, ignored)
    counts = (targets != ignored).flatten(1).any(1) if targets.dim() > 1 else targets != ignored
    return Hits(torch.where(counts, right, 0).sum(), counts.sum())


def of_classes(scores: Tensor, targets: Any) -> bool:
    """Return whether there is an accuracy.

    Scores are [n, classes, ...] with at least two classes, and targets integers [n, ...].
    """
    whole = isinstance(targets, Tensor) and not targets.is_floating_point()
    classes = scores.dim() > 1 and scores.shape[1] > 1
    return whole and classes and scores.shape[:1] + scores.shape[2:] == targets.shape


def right_of_each(scores: Tensor, targets: Tensor, ignored: int = IGNORED) -> Tensor:
    """Return how right each sample [n] is: the share of its targets with the likeliest class.

    Targets that are ``ignored`` do not count. NaN for a sample without any that counts.
    """
    right = scores.argmax(1) == targets
    if right.dim() == 1:
        return right
    counts = (targets != ignored).flatten(1)
    return (right.flatten(1) & counts).sum(1) / counts.sum(1)


def joined(parts: Sequence[Any]) -> Any:
    """Return as one what several passes returned: a tensor each, or several in a structure."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat([*parts])
    return tree_map(lambda *tensors: torch.cat(tensors), *parts)


def numbers_of(
    measure: Callable[..., Any] | None, passes: Sequence[tuple[Any, Any]]
) -> dict[str, float]:
    """Return what ``measure(outputs, targets)`` says of all passes at once; {} if it is None."""
    if measure is None:
        return {}
    try:
        outputs, targets = (joined(parts) for parts in zip(*passes, strict=True))
    except RuntimeError as error:
        raise ValueError(f"metrics need outputs of one shape in all batches: {error}") from error
    found = measure(outputs, targets)
    require(isinstance(found, Mapping), "metrics", "a function that returns {name: number}", found)
    for name in found:
        wanted = "a name other than loss and accuracy"
        require(isinstance(name, str) and name not in OURS, "a metric", wanted, name)
    return {name: float(value) for name, value in found.items()}
