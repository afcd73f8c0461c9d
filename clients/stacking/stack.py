"""The losses of several clients that share one model, as one function of their stacked vectors.

Client i has the parameters ``w[i]`` of vectors [clients, d]. One forward pass under ``torch.vmap``
computes the outputs of all clients, the losses are summed, and one backward pass gives every client
its own gradient. Mini-batches may have different sizes: short ones are padded with samples of
weight 0.
"""

from __future__ import annotations

import functools
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

from clients.learning.passes import CHUNK, called, right_of_each
from clients.learning.pieces import averages
from clients.learning.problem import Problem, gathered
from clients.learning.solvers import precise
from clients.stacking.layers import Forward, chain
from clients.stacking.masks import Masks, masked
from clients.stacking.means import (
    NO_MEAN,
    TRIED,
    NoMean,
    check_mean,
    of_each,
    to_try,
)

Numbers = npt.NDArray[np.int64]
NONE: Mapping[str, Tensor] = MappingProxyType({})


class Batches(NamedTuple):
    """A mini-batch of each client: sample numbers [clients, b], and weights [clients, b], which are
    1 / the batch's size, or 0 for padding."""

    samples: Tensor
    weights: Tensor


class Results(NamedTuple):
    """Results on a mini-batch of each client: mean losses [clients, 1], and numbers of right
    samples [clients, 1] (None where targets are no classes)."""

    loss: Tensor
    right: Tensor | None


class Stack:
    """f_1, ..., f_k of ``problems``, as functions of stacked vectors w [k, d].

    The problems share model, loss and penalty; ``obstacles.obstacle`` says whether a problem can be
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

    def gradient(
        self, w: Tensor, batches: Batches, *, judged: bool = True
    ) -> tuple[Tensor, Results]:
        """Return the gradients [k, d] at ``w`` [k, d] on the mini-batches, and their results.

        Right answers are counted only if ``judged``.
        """
        leaves = [piece.detach().requires_grad_() for piece in self.model.views(w)]
        with torch.enable_grad():
            losses, right = self._forward(leaves, batches, judged and self.classifies)
            slopes = torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)
        gradient, losses = joined(slopes), losses.detach()
        if self._penalty is not None:
            at = w.detach().requires_grad_()
            with torch.enable_grad():
                values = vmap(self._penalty)(at)
                gradient += torch.autograd.grad(values.sum(), at)[0]
            losses = losses + values.detach()
        return gradient, Results(losses[:, None], None if right is None else right[:, None])

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
                product = joined(pieces)
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
        tensors = dict(zip(self.model.layout.trainable, values, strict=True)) | dict(buffers)
        module = self.model.module
        with nullcontext() if self.masks is None else masked(module, self.masks):
            return called(lambda x: functional_call(module, tensors, (x,)), inputs)


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """Return the vectors [clients, d] of pieces [clients, ...]: inverse of ``FlatModel.views``."""
    flat = [p.movedim(-3, -1) if p.dim() == 5 else p for p in pieces]
    return torch.cat([piece.reshape(len(piece), -1) for piece in flat], 1)
