"""Losses as means over samples, which is what lets a stack weigh its samples itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from clients.learning.objective import Loss

MEANS = (
    functional.cross_entropy,
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy_with_logits,
)
"""Functions of PyTorch that are means over samples, if no target is negative (``ignore_index``)."""
MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
NO_MEAN = "its loss is no mean over samples (it has class weights, or leaves targets out)"
AT_ONCE = 1 << 22
"""Numbers of outputs that are drawn at once."""


class NoMean(ValueError):
    """A loss that a stack cannot weigh."""


def of_each(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample [n]; their mean is ``loss``."""
    smoothing = 0.0 if loss is functional.cross_entropy else _smoothing(loss)
    if smoothing is not None:
        each = functional.cross_entropy(
            outputs, targets, reduction="none", label_smoothing=smoothing
        )
        return each.flatten(1).mean(1) if each.dim() > 1 else each
    return vmap(lambda output, target: loss(output[None], target[None]))(outputs, targets)


def _smoothing(loss: Any) -> float | None:
    """Return the label smoothing of a plain ``nn.CrossEntropyLoss``; None for another loss."""
    plain = (
        type(loss) is nn.CrossEntropyLoss
        and loss.weight is None
        and loss.reduction == "mean"
        and loss.ignore_index < 0
    )
    return float(loss.label_smoothing) if plain else None


def averages(loss: Loss) -> bool:
    """Return whether the loss is one of PyTorch's that are means over samples, for all data."""
    if type(loss) in MODULES:
        return bool(loss.reduction == "mean")  # type: ignore[attr-defined]
    return any(loss is one for one in MEANS) or _smoothing(loss) is not None


def check_means(loss: Loss, like: Tensor, targets: Tensor, clients: Sequence[Tensor]) -> None:
    """Raise :class:`NoMean` if the loss of a client's samples is not the mean of their losses.

    Class weights and targets that are ignored make such losses. Which samples have them is a matter
    of the data: so all samples of each client are tried, with outputs drawn at random from (0, 1).

    Parameters
    ----------
    like : Tensor [1, ...]
        A sample's outputs.
    targets : Tensor [n, ...]
    clients : tensors of the clients' rows in ``targets``
    """
    generator, tolerance = torch.Generator().manual_seed(1), torch.finfo(like.dtype).eps ** 0.5
    width = max(2, AT_ONCE // max(1, like.numel()))
    drawn = [rows[torch.randperm(len(rows), generator=generator)] for rows in clients]
    pieces = [piece for rows in drawn for piece in torch.split(rows, width)]
    while pieces:
        count = max(1, int((torch.tensor([len(p) for p in pieces]).cumsum(0) <= width).sum()))
        some, pieces = pieces[:count], pieces[count:]
        sizes = [len(piece) for piece in some]
        y = targets.index_select(0, torch.cat(some))
        shape = (len(y), *like.shape[1:])
        outputs = torch.rand(shape, generator=generator).clamp(1e-3, 1 - 1e-3).to(like)
        with torch.no_grad():
            each = torch.split(of_each(loss, outputs, y), sizes)
            whole = map(loss, torch.split(outputs, sizes), torch.split(y, sizes))
            for one, mean in zip(each, whole, strict=True):
                if not (one.mean() - mean).abs() <= tolerance * mean.abs():
                    raise NoMean(NO_MEAN)
