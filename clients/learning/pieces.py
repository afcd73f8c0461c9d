"""The loss on a batch that passes through the model in pieces.

It is what the user's function returns for the whole batch: the mean over the pieces, unless the
function has class weights, leaves labels out, is a sum, or compares samples. Then the outputs of
all pieces are computed first. The derivative of the loss by each of them passes back through the
model, again in pieces.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from clients.learning import passes
from clients.learning.passes import Inputs, even_pieces, judged
from clients.learning.replay import Before, without_trace
from fl_strategies.core.log import log_once
from fl_strategies.core.schedules import require, shown

if TYPE_CHECKING:
    from clients.learning.objective import Objective

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
OURS = ("", "loss", "accuracy")
"""What no metric of a user's may be called."""


def smoothing_of(loss: Any) -> float | None:
    """Return the label smoothing of a plain ``nn.CrossEntropyLoss``; None for another loss."""
    plain = (
        type(loss) is nn.CrossEntropyLoss
        and loss.weight is None
        and loss.reduction == "mean"
        and loss.ignore_index < 0
    )
    return float(loss.label_smoothing) if plain else None


def averages(loss: Any) -> bool:
    """Return whether the loss is one of PyTorch's that are means over samples, for all data."""
    if type(loss) in MODULES:
        return bool(loss.reduction == "mean")
    return any(loss is one for one in MEANS) or smoothing_of(loss) is not None


def averages_on(loss: Any, targets: Tensor) -> bool:
    """Return whether the loss is one of them, and leaves out none of these targets."""
    return averages(loss) and (targets.is_floating_point() or not bool((targets < 0).any()))


class Piece(NamedTuple):
    """A piece of a batch: its loss, the module's outputs (a tensor or several), its targets."""

    loss: Tensor
    outputs: Any
    targets: Tensor


def add_up(problem: Objective, pieces: Sequence[Piece]) -> bool:
    """Return whether the loss on all pieces is the mean of theirs over samples, up to rounding.

    True also where it cannot be known: a class may add something to the loss, and outputs of other
    shapes in each piece have no whole.
    """
    if all(averages_on(problem.loss, piece.targets) for piece in pieces):
        return True
    if (whole := loss_on(problem, pieces)) is None:
        return True
    losses = [float(piece.loss) for piece in pieces]
    sizes = [len(piece.targets) for piece in pieces]
    mean = sum(map(operator.mul, losses, sizes)) / sum(sizes)
    if not math.isfinite(mean):
        return not bool(whole.isfinite())
    rounding: float = torch.finfo(whole.dtype).eps ** 0.5
    return bool(abs(mean - float(whole)) <= rounding * max(map(abs, losses)))


@torch.no_grad()
def loss_on(problem: Objective, pieces: Sequence[Piece]) -> Tensor | None:
    """Return the loss on all pieces; None where it cannot be computed from their outputs."""
    if not problem.is_loss_of_outputs:
        return None
    shapes = set()
    for _, outputs, targets in pieces:
        leaves = [*_leaves(outputs), targets]
        if not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
            return None
        if any(len(leaf) != len(targets) for leaf in leaves):
            return None
        shapes.add(tuple(leaf.shape[1:] for leaf in leaves))
    if len(shapes) > 1:
        return None
    return problem.loss(
        joined([piece.outputs for piece in pieces]), torch.cat([piece.targets for piece in pieces])
    )


def joined(parts: Sequence[Any]) -> Any:
    """Return as one what the pieces hold: a tensor each, or several in a tuple, list or dict."""
    if isinstance(parts[0], Tensor):
        return torch.cat([*parts])
    return tree_map(lambda *tensors: torch.cat(tensors), *parts)


def numbers_of(measure: Callable[..., Any] | None, pieces: Sequence[Piece]) -> dict[str, float]:
    """Return what ``measure(outputs, targets)`` says of all pieces at once; {} if it is None."""
    if measure is None:
        return {}
    targets = torch.cat([piece.targets for piece in pieces])
    found = measure(joined([piece.outputs for piece in pieces]), targets)
    require(isinstance(found, Mapping), "metrics", "a function that returns {name: number}", found)
    for name in found:
        wanted = "a name other than loss and accuracy"
        require(isinstance(name, str) and name not in OURS, "a metric", wanted, name)
    return {name: _number(name, value) for name, value in found.items()}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"the metric {name!r} must be a number, got {shown(value)}") from None


def _leaves(outputs: Any) -> list[Any]:
    return [outputs] if isinstance(outputs, Tensor) else tree_leaves(outputs)


def backward_in_pieces(
    problem: Objective, inputs: Inputs, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Leave the gradient on a batch in the parameters; return loss and outputs, detached."""
    if any(norm.training for norm in problem.batch_norms):
        log_once(
            f"a batch of more than {passes.CHUNK} samples passes through the model in pieces, and"
            f" BatchNorm normalises each by itself: a batch of {passes.CHUNK} samples is one piece"
        )
    model, loss = problem.model, torch.zeros_like(problem.model.vector[0])
    before = None if averages_on(problem.loss, targets) else Before(model.module)
    pieces = []
    for x, y in even_pieces(inputs, targets):
        value, outputs = problem.forward(x, y)
        share = value * (len(y) / len(targets))
        torch.autograd.backward(share)
        loss = loss + share.detach()
        pieces.append(Piece(value.detach(), _detached(outputs), y))
    if before is None or add_up(problem, pieces):
        return loss, torch.cat([judged(outputs, y) for _, outputs, y in pieces])
    before.restore()
    model.clear_gradients()
    return _backward_at_once(problem, inputs, targets)


def _backward_at_once(problem: Objective, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`backward_in_pieces`, by the derivatives of the loss on the whole batch.

    The second pass of a piece has the dropout masks of the first.
    """
    pieces = [*even_pieces(inputs, targets)]
    with torch.no_grad(), without_trace([problem.model.vector], problem.model.module):
        outputs = joined([problem.outputs(x) for x, _ in pieces])
    leaves = [leaf.requires_grad_() for leaf in _leaves(outputs) if leaf.is_floating_point()]
    loss = problem.loss(outputs, targets)
    slopes = torch.autograd.grad(loss, leaves, materialize_grads=True)
    sizes = [len(y) for _, y in pieces]
    for (x, _), *along in zip(pieces, *(torch.split(s, sizes) for s in slopes), strict=True):
        floats = [leaf for leaf in _leaves(problem.outputs(x)) if leaf.is_floating_point()]
        reached = [(leaf, s) for leaf, s in zip(floats, along, strict=True) if leaf.requires_grad]
        torch.autograd.backward([leaf for leaf, _ in reached], [s for _, s in reached])
    return loss.detach(), judged(outputs, targets).detach()


def _detached(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.detach()
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)
