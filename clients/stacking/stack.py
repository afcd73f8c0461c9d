"""The losses of several clients that share one model, as one function of their stacked vectors.

Client i has the parameters ``w[i]`` of vectors [clients, d]. One forward pass computes the outputs
of all clients, the losses are summed, and one backward pass gives every client its own gradient.
Mini-batches may have different sizes: short ones are padded with samples of weight 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from clients.learning.border import Border
from clients.learning.data import gathered, widened
from clients.learning.evaluate import of_classes, right_of_each
from clients.learning.loop import precise
from clients.learning.problem import Problem, evaluating, of_type
from clients.stacking.stackable import ELEMENTWISE, loss_of_each

Numbers = npt.NDArray[np.int64]
PIECE = 1000
"""The most samples of a client in a pass over whole data sets."""
Forward = Callable[[Sequence[Tensor], Tensor], Tensor]
"""Outputs [clients, b, ...] for parameters [clients, ...] and inputs [clients, b, ...]."""


class Batches(NamedTuple):
    """A mini-batch of each client: sample numbers [clients, b], and weights [clients, b], which are
    1 / the batch's size, or 0 for padding."""

    samples: Tensor
    weights: Tensor


class Results(NamedTuple):
    """Results on a mini-batch of each client: mean losses [clients], and numbers of right samples
    [clients] (None where they were not counted, or targets are no classes)."""

    loss: Tensor
    right: Tensor | None


class Stack:
    """f_1, ..., f_k of ``problems``, as functions of stacked vectors w [k, d].

    The problems share model, loss and penalty, and ``stackable.obstacle`` has nothing against them.
    ``samples_at_once`` bounds the samples, of all clients together, in a forward pass over whole
    data sets; mini-batches are never cut. Raises ``ValueError`` for targets that the loss ignores.
    """

    def __init__(self, problems: Sequence[Problem], *, samples_at_once: int = 1 << 20) -> None:
        first = problems[0]
        self.model, self._penalty = first.model, first.penalty
        self.sizes: Numbers = np.array([len(problem) for problem in problems])
        self._ends, self._width = np.cumsum(self.sizes), max(1, samples_at_once // len(problems))
        # all samples that any client has, of which client i has those in its part of _rows
        held = [problem.tensors for problem in problems]
        sources = {id(p.inputs): p for p in held}
        begins = np.cumsum([0, *(len(p.inputs) for p in sources.values())]).tolist()
        begin = dict(zip(sources, begins, strict=False))
        self._inputs, self._targets = (
            parts[0] if len(parts) == 1 else torch.cat(parts)
            for parts in zip(*((p.inputs, p.targets) for p in sources.values()), strict=True)
        )
        self.classifies = not self._targets.is_floating_point()
        if self.classifies and bool((self._targets < 0).any()):
            raise ValueError("the loss leaves out samples whose target is negative")
        rows = [torch.arange(len(p)) if p.rows is None else p.rows for p in held]
        offsets = np.repeat([begin[id(p.inputs)] for p in held], self.sizes)
        placed = torch.cat([of.to(self._inputs.device) for of in rows])
        self._rows = placed + torch.from_numpy(offsets).to(placed.device)
        self._loss_of_each: Any = loss_of_each(first.loss)
        self._outputs = forward_of(self.model, self._inputs)

    def __len__(self) -> int:
        return len(self.sizes)

    def batches(self, samples: Numbers, sizes: Numbers) -> Batches:
        """Return mini-batches, on the device, of the clients' own samples [..., clients, b].

        Of each mini-batch the first ``sizes`` [..., clients] samples count.
        """
        like = self.model.like
        starts = (self._ends - self.sizes)[:, None]
        placed = self._rows.take(torch.from_numpy(samples + starts).to(like.device))
        counts = np.arange(samples.shape[-1]) < sizes[..., None]
        weights = counts / np.maximum(sizes, 1)[..., None]
        return Batches(placed, torch.from_numpy(weights).to(like))

    def whole(self) -> Iterator[tuple[Batches, Tensor]]:
        """Yield all samples of the clients in pieces, and each piece's shares [clients, 1]."""
        longest, width = int(self.sizes.max()), min(PIECE, self._width)
        for start in range(0, longest, width):
            stop = min(start + width, longest)
            counted = np.clip(self.sizes - start, 0, stop - start)
            samples = np.minimum(np.arange(start, stop), self.sizes[:, None] - 1)
            share = torch.from_numpy((counted / self.sizes)[:, None]).to(self.model.like)
            yield self.batches(samples, counted), share

    def gradient(
        self, w: Tensor, batches: Batches, *, count_right: bool = True
    ) -> tuple[Tensor, Results]:
        """Return the gradients [k, d] at ``w`` [k, d] on the mini-batches, and their results.

        Right answers are counted only if ``count_right``.
        """
        at = w.detach().requires_grad_()
        with torch.enable_grad():
            losses, right = self._losses(at, batches, count_right and self.classifies)
            (gradient,) = torch.autograd.grad(losses.sum(), at)
        return gradient, Results(losses.detach(), right)

    def hessian_product(self, w: Tensor, v: Tensor, batches: Batches) -> Tensor:
        """Return the Hessians at ``w`` [k, d] on the mini-batches, times ``v`` [k, d]."""
        at = w.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(
                self._losses(at, batches)[0].sum(), at, create_graph=True
            )
            return torch.autograd.grad((slope * v).sum(), at, materialize_grads=True)[0]

    @torch.no_grad()
    def loss(self, w: Tensor) -> Tensor:
        """Return the mean losses [k, 1] on all samples, the model in evaluation mode."""
        with evaluating(self.model.module):
            pieces = [
                precise(share) * precise(self._losses(w, piece)[0][:, None])
                for piece, share in self.whole()
            ]
        return sum(pieces[1:], pieces[0])

    def _losses(
        self, w: Tensor, batches: Batches, count_right: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mean losses [k], and the numbers of right samples [k] if ``count_right``."""
        samples, weights = batches
        flat = samples.reshape(-1)
        inputs = widened(gathered(self._inputs, flat))
        targets = self._targets.index_select(0, flat)
        outputs = self._outputs(self.model.views(w), inputs.view(*samples.shape, *inputs.shape[1:]))
        outputs = outputs.flatten(0, 1)
        each = self._loss_of_each(outputs, of_type(targets, outputs))
        if each.numel() not in (len(targets), targets.numel()):
            raise ValueError(f"outputs {outputs.shape} do not fit the targets {targets.shape}")
        each = each.flatten(1).mean(1) if each.dim() > 1 else each
        losses = (each.view(samples.shape) * weights).sum(1)
        if self._penalty is not None:
            losses = losses + vmap(self._penalty)(w)
        if not count_right:
            return losses, None
        if not of_classes(outputs, targets):
            return losses, torch.full_like(losses, math.nan, requires_grad=False)
        right = right_of_each(outputs.detach(), targets).view(samples.shape)
        return losses, torch.where(weights > 0.0, right, 0).sum(1)


def forward_of(model: Border, inputs: Tensor) -> Forward:
    """Return the forward pass of a model for stacks of its shared parameters, in their order.

    ``inputs`` [n, ...] are like those that it will get. ``torch.vmap`` runs any model, and costs
    more than a small network does: a chain of linear and elementwise layers is run by batched
    matrix products.
    """
    layers = [*model.module] if type(model.module) is nn.Sequential else [model.module]
    number = {id(parameter): n for n, parameter in enumerate(model.shared)}
    simple = (nn.Flatten, nn.Linear, *ELEMENTWISE)
    of_vectors = inputs.dim() == 2 or isinstance(layers[0], nn.Flatten)
    all_shared = {*map(id, model.module.parameters())} <= number.keys()

    def chained(values: Sequence[Tensor], x: Tensor) -> Tensor:
        for layer in layers:
            if isinstance(layer, nn.Flatten):
                x = x.flatten(2)
            elif isinstance(layer, nn.Linear):
                # W x, not x W': the gradient of W then comes in the order in which W lies
                weight, x = values[number[id(layer.weight)]], x.transpose(1, 2)
                bias = None if layer.bias is None else values[number[id(layer.bias)]][..., None]
                x = torch.bmm(weight, x) if bias is None else torch.baddbmm(bias, weight, x)
                x = x.transpose(1, 2)
            else:
                x = layer(x)
        return x

    def called(values: Sequence[Tensor], x: Tensor) -> Tensor:
        tensors = dict(zip(model.layout.trainable, values, strict=True))
        outputs: Tensor = functional_call(model.module, tensors, (x,))
        return outputs

    if of_vectors and all_shared and all(type(layer) in simple for layer in layers):
        return chained
    return vmap(called)
