"""The losses of several clients that share one model, as one function of their stacked vectors.

Client i has the parameters ``w[i]`` of vectors [clients, d]. One forward pass under ``torch.vmap``
computes the outputs of all clients, the losses are summed, and one backward pass gives every client
its own gradient. Mini-batches may have different sizes: short ones are padded with samples of
weight 0.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from clients.learning.layers import Forward, chain
from clients.learning.masks import Masks, dropouts, masked
from clients.learning.means import (
    NO_MEAN,
    TRIED,
    NoMean,
    averages,
    check_mean,
    of_each,
    to_try,
)
from clients.learning.model import FlatModel
from clients.learning.objective import CHUNK, Objective, called, right_of_each
from clients.learning.problem import Problem, gathered
from clients.learning.replay import seed_generators, without_trace
from clients.learning.solvers import precise
from fl_strategies.core.reasons import of_exception

Numbers = npt.NDArray[np.int64]
NONE: Mapping[str, Tensor] = MappingProxyType({})


class Batches(NamedTuple):
    """A mini-batch of each client: sample numbers [clients, b], and weights [clients, b], which are
    1 / the batch's size, or 0 for padding."""

    samples: Tensor
    weights: Tensor


class Found(NamedTuple):
    """Results on a mini-batch of each client: mean losses [clients, 1], and numbers of right
    samples [clients, 1] (None where targets are no classes)."""

    loss: Tensor
    right: Tensor | None


class Stack:
    """f_1, ..., f_k of ``problems``, as functions of stacked vectors w [k, d].

    The problems share model, loss and penalty; :func:`obstacle` says whether a problem can be
    stacked. Where a method takes ``who``, these are the numbers of the clients whose vectors are
    given. ``masks``, if set, draws the masks of the module's dropout.
    """

    def __init__(self, problems: Sequence[Problem], *, samples_at_once: int = 1 << 20) -> None:
        first = problems[0]
        self._at_once = samples_at_once
        self.model, self.classifies = first.model, first.classifies
        self.sizes: Numbers = np.array([len(problem) for problem in problems])
        self._loss, self._penalty = first.loss, first.penalty
        self.masks: Masks | None = None
        # all samples that any client has: those of client i are _rows[_starts[i] :]
        sources = {id(p.inputs): (p.inputs, p.targets) for p in problems}
        begins = np.cumsum([0, *(len(x) for x, _ in sources.values())]).tolist()
        begin = dict(zip(sources, begins, strict=False))
        tensors = [*zip(*sources.values(), strict=True)]
        self._inputs, self._targets = (t[0] if len(t) == 1 else torch.cat(t) for t in tensors)
        if self.classifies and bool((self._targets < 0).any()):
            raise NoMean(NO_MEAN)
        self._rows: Tensor | None = None
        self._starts = np.array([begin[id(p.inputs)] for p in problems])
        if any(p.rows is not None for p in problems):
            each = [torch.arange(len(p)) if p.rows is None else p.rows for p in problems]
            if len(sources) > 1:
                each = [r + begin[id(p.inputs)] for r, p in zip(each, problems, strict=True)]
            self._rows = torch.cat([r.to(self._inputs.device) for r in each])
            self._starts = np.cumsum([0, *self.sizes[:-1]])
        if not averages(self._loss):
            self._check_mean()

    @torch.no_grad()
    def _check_mean(self) -> None:
        """Raise :class:`.NoMean` if the loss is no mean over the clients' samples."""
        rows = self._rows
        targets = self._targets if rows is None else self._targets.index_select(0, rows)
        tried = to_try(targets, max(2, min(TRIED, self._at_once)))
        inputs = gathered(self._inputs, tried if rows is None else rows[tried])
        self.model.module.eval()
        check_mean(self._loss, called(self.model.module, inputs), targets[tried])

    def __len__(self) -> int:
        return len(self.sizes)

    def batches(self, samples: Numbers, sizes: Numbers, who: Any = slice(None)) -> Batches:
        """Return mini-batches, on the device, of the clients' own samples [..., clients, b].

        Of each mini-batch the first ``sizes`` [..., clients] samples count.
        """
        like = self.model.vector
        placed = torch.from_numpy(samples + self._starts[who][:, None]).to(like.device)
        if self._rows is not None:
            placed = self._rows.take(placed)
        counts = np.arange(samples.shape[-1]) < sizes[..., None]
        weights = counts / np.maximum(sizes, 1)[..., None]
        return Batches(placed, torch.from_numpy(weights).to(like))

    def whole(self, who: Any = slice(None)) -> Iterator[tuple[Batches, Tensor]]:
        """Yield all samples of the clients in pieces, and each piece's shares [clients, 1]."""
        sizes = self.sizes[who]
        longest, width = int(sizes.max()), max(1, min(CHUNK, self._at_once // len(sizes)))
        for start in range(0, longest, width):
            stop = min(start + width, longest)
            counted = np.clip(sizes - start, 0, stop - start)
            samples = np.minimum(np.arange(start, stop), sizes[:, None] - 1)
            share = torch.from_numpy((counted / sizes)[:, None]).to(self.model.vector)
            yield self.batches(samples, counted, who), share

    # ---- the functions ------------------------------------------------------------------------

    def gradient(self, w: Tensor, batches: Batches, *, judged: bool = True) -> tuple[Tensor, Found]:
        """Return the gradients [k, d] at ``w`` [k, d] on the mini-batches, and their results.

        Right answers are counted only if ``judged``.
        """
        leaves = [piece.detach().requires_grad_() for piece in self.model.views(w)]
        with torch.enable_grad():
            losses, right = self._forward(leaves, batches, judged and self.classifies)
            slopes = torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)
        gradient, losses = self.model.stacked(slopes), losses.detach()
        if self._penalty is not None:
            at = w.detach().requires_grad_()
            with torch.enable_grad():
                values = vmap(self._penalty)(at)
                gradient += torch.autograd.grad(values.sum(), at)[0]
            losses = losses + values.detach()
        return gradient, Found(losses[:, None], None if right is None else right[:, None])

    def full_gradient(self, w: Tensor, who: Any = slice(None)) -> Tensor:
        """Return the gradients [k, d] on all samples of the clients."""
        parts = [share * self.gradient(w, piece)[0] for piece, share in self.whole(who)]
        return sum(parts[1:], parts[0])

    def hessian_product(self, w: Tensor, v: Tensor, batches: Batches) -> Tensor:
        """Return the Hessians at ``w`` [k, d] on the mini-batches, times ``v`` [k, d]."""
        leaves = [piece.detach().requires_grad_() for piece in self.model.views(w)]
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            losses, _ = self._forward(leaves, batches)
            slopes = torch.autograd.grad(
                losses.sum(), leaves, create_graph=True, materialize_grads=True
            )
            pairs = zip(slopes, self.model.views(v), strict=True)
            along = torch.stack([(slope * u).sum() for slope, u in pairs]).sum()
            product = torch.zeros_like(v)
            if along.requires_grad:  # else the gradient is the same everywhere
                pieces = torch.autograd.grad(along, leaves, materialize_grads=True)
                product = self.model.stacked(pieces)
        if self._penalty is not None:
            at = w.detach().requires_grad_()
            with torch.enable_grad():
                values = vmap(self._penalty)(at)
                (slope,) = torch.autograd.grad(values.sum(), at, create_graph=True)
                if slope.requires_grad:
                    product += torch.autograd.grad((slope * v).sum(), at)[0]
        return product

    @torch.no_grad()
    def loss(self, w: Tensor) -> Tensor:
        """Return the mean losses [k, 1] on all samples, the model in evaluation mode."""
        self.model.module.eval()
        views = self.model.views(w)
        parts = [
            precise(share) * precise(self._forward(views, piece)[0][:, None])
            for piece, share in self.whole()
        ]
        if self._penalty is not None:
            parts.append(precise(vmap(self._penalty)(w)[:, None]))
        return sum(parts[1:], parts[0])

    def _forward(
        self, leaves: Sequence[Tensor], batches: Batches, judged: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mean losses [k], without penalty, and the numbers of right samples [k]."""
        losses, outputs, targets = self._of_samples(leaves, batches.samples)
        losses = (losses * batches.weights).sum(1)
        if not judged:
            return losses, None
        right = right_of_each(outputs.detach(), targets).view(batches.samples.shape)
        return losses, torch.where(batches.weights > 0.0, right, 0).sum(1)

    def _of_samples(
        self, leaves: Sequence[Tensor], samples: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses [k, b] of samples [k, b], their outputs and targets [k b, ...]."""
        inputs, targets = self._gathered(samples)
        outputs = self._outputs(leaves, inputs).flatten(0, 1)
        return of_each(self._loss, outputs, targets).view(samples.shape), outputs, targets

    def _gathered(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs [k, b, ...] and targets [k b, ...] in these rows [k, b]."""
        flat = rows.reshape(-1)
        inputs, targets = gathered(self._inputs, flat), self._targets.index_select(0, flat)
        return inputs.view(*rows.shape, *inputs.shape[1:]), targets

    @functools.cached_property
    def _outputs(self) -> Callable[..., Tensor]:
        """The module's outputs [k, b, ...] for parameters [k, ...] and inputs [k, b, ...]."""
        return self._chained() or vmap(self._called)

    def _chained(self, heads: Sequence[nn.Module] = ()) -> Forward | None:
        """Return :func:`.layers.chain` of the module and ``heads``, None where it cannot be."""
        module = self.model.module
        first = next(module.children(), None)
        of_vectors = self._inputs.dim() == 2 or isinstance(first, nn.Flatten)
        drop = None if self.masks is None else self.masks.dropped
        return chain(module, self.model.shared, heads, drop) if of_vectors else None

    def _called(
        self, values: Sequence[Tensor], inputs: Tensor, buffers: Mapping[str, Tensor] = NONE
    ) -> Any:
        """Return the module's outputs for the parameters, and some of its buffers, of a client."""
        given = dict(zip(self.model.layout.trainable, values, strict=True)) | dict(buffers)
        module = self.model.module
        with nullcontext() if self.masks is None else masked(module, self.masks):
            return called(lambda x: functional_call(module, given, (x,)), inputs)


# ---- what can be stacked ------------------------------------------------------------------------

_TRIED: weakref.WeakKeyDictionary[FlatModel, dict[Any, str]] = weakref.WeakKeyDictionary()
"""Obstacles that were found: by model, then by variant, loss and kind of inputs."""


class Variant(NamedTuple):
    """A loss that an algorithm makes of f, as a client alone has it and as a stack has it."""

    alone: Callable[[Problem], Objective]
    at_once: Callable[[Stack], Stack]


PLAIN = Variant(lambda problem: problem, lambda stack: stack)


def obstacle(problem: Objective, variant: Variant = PLAIN) -> str:
    """Return why the problem's client must be trained alone, or "" if it can be stacked.

    ``variant`` is the loss that the client's algorithm trains on.
    """
    if type(problem) is not Problem:
        return f"a {type(problem).__name__} has no fixed samples or a loss of its own"
    if problem.own_gradient:
        return "it has a gradient of its own"
    model = problem.model
    if model.kept:
        return f"arrays are each client's own ({model.kept[0]})"
    if problem.autocast is not None:
        return f"it runs in {problem.autocast}"
    try:
        hash((problem.loss, problem.penalty))
    except TypeError as error:
        return f"its loss and penalty tell what can be stacked, and one has no hash: {error}"
    like = problem.inputs.shape[1:], problem.inputs.dtype, problem.targets.dtype
    key = (variant, problem.loss, *like)
    found = _TRIED.setdefault(model, {})
    if key not in found:
        found[key] = _of_module(model) or _of_trial(problem, variant)
    return found[key]


def activations(problem: Objective) -> int:
    """Return how many numbers a sample needs in the model: its inputs and all layers' outputs."""
    model, outputs = problem.model, [0]

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs[0] += output.numel() if isinstance(output, Tensor) else 0

    layers = [part for part in model.module.modules() if not any(part.children())]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        inputs, targets = (part[:1] for part in problem.whole)
        model.module.eval()
        with torch.no_grad():
            problem.forward(inputs, targets)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs[0] + inputs.numel()


def _of_module(model: FlatModel) -> str:
    device = model.vector.device.type
    for part in model.module.modules():
        name = type(part).__name__
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            return f"{name} looks at a whole mini-batch and keeps running statistics"
        if isinstance(part, nn.RNNBase):
            return f"torch.vmap does not take recurrent layers ({name})"
        drops = isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0.0
        if drops and (type(part) is not nn.Dropout or part.p == 1.0 or device != "cpu"):
            return f"{name} on {device} draws masks that a stack does not"
    return ""


def _of_trial(problem: Problem, variant: Variant) -> str:
    """Return why two stacked clients do not get the gradients of each alone, or "" if they do."""
    model, (inputs, targets) = problem.model, problem.whole
    other = next((i for i in range(1, len(targets)) if not targets[i].equal(targets[0])), 0)
    pair = torch.tensor([0, other], device=targets.device)
    problem = Problem(
        model, problem.loss, gathered(inputs, pair), targets[pair], penalty=problem.penalty
    )
    before = model.vector.clone()
    w = torch.randn(len(before), generator=torch.Generator().manual_seed(1)).to(before) / 20
    with without_trace([before], model.module):
        model.vector.copy_(w)
        try:
            both = Stack([problem, problem])
            both.masks = Masks([1, 1]) if dropouts(model.module) else None
            stack = variant.at_once(both)
            alone = variant.alone(problem)
            model.vector.copy_(w)
            model.module.train()
            x, y = alone.whole
            numbers = np.array([[0, 1], [0, 1]])  # the first client's batch is one sample, padded
            sizes = np.array([1, 2])
            with both.masks.of(np.arange(2), sizes) if both.masks else nullcontext():
                found, _ = stack.gradient(w.expand(2, -1), stack.batches(numbers, sizes))
            for mine, count in zip(found, (1, 2), strict=True):
                seed_generators(1, w.device)
                alone.gradient(x[:count], y[:count])
                apart, size = mine - model.gradient, model.gradient.norm()
                if not apart.norm() <= torch.finfo(mine.dtype).eps ** 0.5 * size:
                    return (
                        "its loss is no mean over samples, a sample's depends on others, or a"
                        " convolution's output has dropout"
                    )
        except NoMean as error:
            return str(error)
        except Exception as error:
            return f"a trial stack fails: {of_exception(error)}"
        finally:
            model.vector.copy_(before)
    return ""
