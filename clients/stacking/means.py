"""Losses as means over samples, which is what lets a stack weigh its samples itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from clients.learning.objective import Loss
from clients.learning.pieces import smoothing_of

NO_MEAN = "its loss is no mean over samples (it has class weights, or leaves targets out)"
TRIED = 256
"""Samples that are tried at most."""


class NoMean(ValueError):
    """A loss that a stack cannot weigh."""


def of_each(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample [n]; their mean is ``loss``."""
    smoothing = 0.0 if loss is functional.cross_entropy else smoothing_of(loss)
    if smoothing is not None:
        each = functional.cross_entropy(
            outputs, targets, reduction="none", label_smoothing=smoothing
        )
        return each.flatten(1).mean(1) if each.dim() > 1 else each
    return vmap(lambda output, target: loss(output[None], target[None]))(outputs, targets)


def check_mean(loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Raise :class:`NoMean` if ``loss`` is not the mean of the losses of the samples."""
    with torch.no_grad():
        whole = loss(outputs, targets)
        error = (of_each(loss, outputs, targets).mean() - whole).abs()
    equal = error <= torch.finfo(outputs.dtype).eps ** 0.5 * whole.abs()
    if whole.isfinite() and not equal:
        raise NoMean(NO_MEAN)


def to_try(targets: Tensor, most: int) -> Tensor:
    """Return places of at most ``most`` samples of ``targets`` [n, ...]: one with each class, and
    others from all over.

    What makes a loss no mean are class weights, and classes that are left out.
    """
    n, half = len(targets), max(1, most // 2)
    spread = torch.linspace(0, n - 1, min(n, half), device=targets.device).long()
    if targets.is_floating_point():
        return spread
    classes, class_of = torch.unique(targets.reshape(-1), return_inverse=True)
    places = torch.arange(n, device=targets.device).repeat_interleave(targets[0].numel())
    first = places.new_full((len(classes),), n).scatter_reduce(0, class_of, places, "amin")
    return torch.cat([first[:half], spread])
