"""Passes of a module over a batch: the call, its pieces, what is right, second derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clients.learning.mistakes import in_inputs
from clients.learning.model import FlatModel

Inputs: TypeAlias = Any
"""What the module is called with: a tensor, a tuple of tensors, or a dict of them by argument."""
Batch: TypeAlias = tuple[Inputs, Tensor]
"""Inputs and targets of some samples, which are the first dimension of each tensor."""

CHUNK = 1000
"""Samples per pass when the gradient of a whole data set is computed."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)
"""Types of inputs that the module gets as int64."""
TESTED = 250
"""Samples per forward pass without a gradient: on a CPU more are slower, and need more memory."""
IGNORED = -100
"""The label that PyTorch's losses leave out by default."""


def right_of_each(outputs: Tensor, targets: Tensor, ignored: int = IGNORED) -> Tensor:
    """Return how right each sample [n] is: the share of its targets with the likeliest class.

    Targets that are ``ignored`` do not count. NaN for a sample without any that counts, and where
    ``outputs`` are not [n, classes, ...] with at least two classes, for ``targets`` [n, ...] of any
    shape: a model with one output for two classes has no accuracy.
    """
    classes = outputs.shape[1] if outputs.dim() > 1 else 0
    if classes < 2 or outputs.shape[:1] + outputs.shape[2:] != targets.shape:
        return torch.full((len(targets),), math.nan, device=outputs.device)
    right = outputs.argmax(1) == targets
    if right.dim() == 1:
        return right
    counts = (targets != ignored).flatten(1)
    return (right.flatten(1) & counts).sum(1) / counts.sum(1)


def judged(outputs: Any, targets: Tensor) -> Tensor:
    """Return outputs of which classes are read: a stand-in [n], without any, for no tensor."""
    return outputs if isinstance(outputs, Tensor) else targets.new_zeros(len(targets))


def ignored_by(loss: Any) -> int:
    """Return the label that ``loss`` leaves out: its ``ignore_index``, or that of PyTorch."""
    index: int = getattr(loss, "ignore_index", IGNORED)
    return index


def called(module: Callable[..., Any], inputs: Inputs) -> Any:
    """Return the outputs of ``module`` on ``inputs``; it gets integer inputs as int64."""
    if isinstance(inputs, Tensor):
        try:
            outputs = module(_as_called(inputs))
        except RuntimeError as error:
            if mistake := in_inputs(inputs, error):
                raise ValueError(mistake) from error
            raise
    elif isinstance(inputs, Mapping):
        outputs = module(**{name: _as_called(value) for name, value in inputs.items()})
    else:
        outputs = module(*(_as_called(value) for value in inputs))
    drawn_from = isinstance(outputs, torch.distributions.Distribution)
    return outputs if drawn_from else getattr(outputs, "logits", outputs)


def _as_called(value: Any) -> Any:
    integer = isinstance(value, Tensor) and value.dtype in INTEGERS
    return value.long() if integer else value


def even_pieces(inputs: Inputs, targets: Tensor) -> Iterator[Batch]:
    """Yield a batch in pieces of equal size, at most ``CHUNK`` samples each.

    So no piece has a single sample, which BatchNorm cannot normalise. A batch whose inputs are not
    all tensors with a row per target, such as a graph's edges, stays whole.
    """
    alone, named = isinstance(inputs, Tensor), isinstance(inputs, Mapping)
    values = [inputs] if alone else [*(inputs.values() if named else inputs)]
    rows = (isinstance(v, Tensor) and v.dim() > 0 and len(v) == len(targets) for v in values)
    count = math.ceil(len(targets) / CHUNK)
    if count == 1 or not all(rows):
        yield inputs, targets
        return
    split = zip(*(value.tensor_split(count) for value in values), strict=True)
    for piece, y in zip(split, targets.tensor_split(count), strict=True):
        yield (piece[0] if alone else dict(zip(inputs, piece, strict=True)) if named else piece), y


def second_derivative(model: FlatModel, value: Tensor, v: Tensor) -> Tensor:
    """Return ``v`` [d] times the second derivative of ``value``, a scalar that has a graph."""
    slopes = torch.autograd.grad(value, model.shared, create_graph=True, materialize_grads=True)
    along = torch.stack(
        [(slope * u).sum() for slope, u in zip(slopes, model.views(v), strict=True)]
    ).sum()
    product = torch.zeros_like(model.vector)
    if not along.requires_grad:  # the gradient is the same everywhere
        return product
    pieces = torch.autograd.grad(along, model.shared, materialize_grads=True)
    for view, piece in zip(model.views(product), pieces, strict=True):
        view.copy_(piece)
    return product


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Switch cuDNN off inside.

    ``torch.backends.cudnn.flags`` would set all flags, ``deterministic`` too. It fails where the
    user has set ``fp32_precision``, whose older name it reads.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


@contextmanager
def twice_differentiable(module: nn.Module) -> Iterator[None]:
    """Inside, passes have second derivatives: of fused attention, cuDNN's recurrent layers too."""
    recurrent = any(isinstance(part, nn.RNNBase) for part in module.modules())
    with sdpa_kernel(SDPBackend.MATH), without_cudnn() if recurrent else nullcontext():
        yield


@contextmanager
def of_one_value(batch_norms: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, a BatchNorm that gets one value per channel uses its running statistics."""
    switched: list[nn.Module] = []

    def choose(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if norm.training and inputs[0].numel() == inputs[0].shape[1]:
            switched.append(norm.eval())

    hooks = [norm.register_forward_pre_hook(choose) for norm in batch_norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for norm in switched:
            norm.train()
