"""A loss over a client's samples, as a function of the parameters of a module."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clients.learning.border import Border
from clients.learning.data import (
    Batch,
    Fetched,
    Inputs,
    NoFixedSamples,
    OneBatch,
    Tensors,
    samples_of,
)
from clients.learning.evaluate import Hits, hits, joined, numbers_of, scores_of
from clients.learning.local_problem import LocalProblem, Metrics
from clients.learning.replay import without_trace
from fl_strategies.core.layout import few
from fl_strategies.core.schedules import check, require
from fl_strategies.solvers.local import LocalTraining

Loss: TypeAlias = Callable[[Any, Any], Tensor]
"""``loss(outputs, targets)``: the mean over the samples of a batch, a scalar tensor."""
Penalty: TypeAlias = Callable[[Tensor], Tensor]
Measure: TypeAlias = Callable[[Any, Any], Mapping[str, float]]


class Problem(LocalProblem):
    """f(w) = mean loss of a module with parameters w over a client's samples.

    The module itself is trained, in place: as in a plain loop of PyTorch, one forward and backward
    pass a mini-batch. A module in evaluation mode is put into training mode; parts of it that are
    in evaluation mode stay so.

    Parameters
    ----------
    module : torch.nn.Module or Border
        Several problems may share one module: each client loads the parameters that it needs. A
        :class:`.Border` says which arrays are trained and travel, where that is not all of them.
    loss : callable
        ``loss(outputs, targets)``, the mean over a batch, where ``outputs`` are what the module
        returned. Over several batches it is the mean of theirs, weighted by samples. There is an
        accuracy where outputs (or their ``logits``) are [n, classes, ...] and targets, integers,
        [n, ...], as ``torch.nn.functional.cross_entropy`` takes them. Targets equal to
        ``loss.ignore_index``, or -100 where the loss has none, do not count in it.
    data : Tensor or array [n, ...], tuple or mapping of these, Dataset, DataLoader
        - Inputs [n, ...], with ``targets`` [n, ...]; or both in a tuple, a mapping or a
          ``TensorDataset``. They are cut by index, which is fast. Integer targets are stored as
          int64, small integers reach the module as int64.
        - A Dataset with a length: each epoch fetches its items in a new order, and PyTorch's
          ``default_collate`` makes batches of them.
        - A DataLoader is iterated as it iterates, an epoch at a time. Its batch size holds; a
          request for another one is refused.

        A batch is a tuple or list that ends with the targets: the module is called with the items
        before it. Or it is a mapping, of which ``target`` names the targets: the module gets the
        rest by name, and the targets too where its ``forward`` has an argument of their name; one
        tensor that it does not take by name, by its place. Tensors are moved to the module's
        device; floating-point ones get the type of its parameters, integers that have the shape of
        the outputs the type of these.
    targets : Tensor or array [n, ...], optional
    rows : Tensor or array of integers, optional
        Indices of the client's samples among the tensors; by default all. So many clients may share
        the data: each mini-batch is gathered from them.
    target : str, optional
        Key of the targets, where data or batches are mappings; by default the only one of
        ``label``, ``labels``, ``target``, ``targets`` and ``y`` that there is.
    samples : int, optional
        The number of samples, which is the client's weight; by default those that the DataLoader's
        sampler takes in an epoch. Needed where the data do not say it: without a length, with
        batches of one's own (``batch_size=None``, a list of batches).
    penalty : callable, optional
        ``penalty(w)``, a scalar added to the loss (a regulariser of the vector w [d]).
    micro_batch : int >= 0 (default 0: no limit)
        The most samples of a batch that pass through the module at once. The gradient is the mean
        over such pieces, weighted by samples: that of the batch, if the loss is a mean.
    autocast : torch.dtype, optional
        Runs forward pass and loss in this lower precision (``torch.autocast``); w stays as it is.
    metrics : callable, optional
        ``metrics(outputs, targets)`` of all samples at once, numbers by name. A client's ``test``
        reports a number ``f1`` as ``eval-f1`` of the global and ``own-f1`` of the personalized
        model, each the mean over clients, weighted by samples. NaN is left out.

    Raises
    ------
    ValueError
        If there is no sample, if the numbers of inputs and targets differ, for data of another
        kind, or for a loss with parameters of its own, which nobody would train.
    """

    def __init__(
        self,
        module: nn.Module | Border,
        loss: Loss,
        data: Any,
        targets: Any = None,
        *,
        rows: Any = None,
        target: str | None = None,
        samples: int | None = None,
        penalty: Penalty | None = None,
        micro_batch: int = 0,
        autocast: torch.dtype | None = None,
        metrics: Measure | None = None,
    ) -> None:
        require(callable(loss), "loss", "a function of outputs and targets", loss)
        parameters = loss.named_parameters() if isinstance(loss, nn.Module) else ()
        if own := [name for name, parameter in parameters if parameter.requires_grad]:
            raise ValueError(
                f"loss has parameters that no client would train, {few(own)}: make them part of the"
                " module, or freeze them by loss.requires_grad_(False)"
            )
        self.model, self.loss, self.penalty = Border.of(module), loss, penalty
        check("micro_batch", micro_batch, low=0, integer=True)
        self.micro_batch, self.autocast, self.metrics = micro_batch, autocast, metrics
        self.data = samples_of(self.model, data, targets, rows=rows, samples=samples, target=target)
        self.fetches = isinstance(self.data, Fetched)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def tensors(self) -> Tensors:
        """The tensors that hold the samples; raises :class:`.NoFixedSamples` for other data."""
        if not isinstance(self.data, Tensors):
            raise NoFixedSamples("samples are fetched from a Dataset or DataLoader, not tensors")
        return self.data

    def most_steps(self, training: LocalTraining) -> float:
        return training.most_steps(len(self), self.data.per_epoch(training))

    def settings(self, training: LocalTraining, config: Mapping[str, Any]) -> LocalTraining:
        return self.data.settings(training, config)

    def with_roles_of(self, model: Border) -> Problem:
        """Return this problem with the arrays' roles of another Border of its module."""
        if model is self.model:
            return self
        other = copy.copy(self)
        other.model = model
        return other

    def on(self, batch: Batch) -> Problem:
        """Return this loss on a mini-batch as all samples."""
        other = copy.copy(self)
        other.data = OneBatch(batch)
        return other

    # ---- what a subclass may change -----------------------------------------------------------

    def forward(self, inputs: Inputs, targets: Any) -> tuple[Tensor, Any]:
        """Return the mean loss on a batch, without penalty, and what the module returned."""
        with self._lowered():
            module = self.model.module
            if isinstance(inputs, Mapping):
                outputs = module(**inputs)
            else:
                outputs = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
            return self.loss(outputs, of_type(targets, outputs)), outputs

    def gradient(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Leave f's gradient on a batch in the parameters; return loss and scores, detached.

        Scores are what accuracy is read of (:func:`.evaluate.scores_of`), if anything is.
        """
        self.model.clear_gradients()
        losses, scores = list[Tensor](), list[Tensor]()
        for inputs, targets, samples in batch.pieces(self.micro_batch):
            loss, outputs = self.forward(inputs, targets)
            if samples < batch.samples:
                loss = loss * (samples / batch.samples)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
            if (of := scores_of(outputs)) is not None:
                scores.append(of.detach())
        loss = sum(losses[1:], losses[0])
        if self.penalty is not None:
            value = self.penalty(self._w())
            if value.requires_grad:  # else all of w is fixed
                torch.autograd.backward(value)
            loss = loss + value.detach()
        return loss, joined(scores) if len(scores) == len(losses) else None

    def hessian_product(self, batch: Batch, v: Tensor) -> Tensor:
        """Return f's Hessian on a batch times ``v`` [d]: exact, by differentiating the gradient.

        Raises ``ValueError`` where the gradient is the class's own, whose derivative this is not.
        """
        model, kind = self.model, type(self)
        if self.own_gradient and kind.hessian_product is Problem.hessian_product:
            raise ValueError(
                f"{kind.__name__} has a gradient of f of its own, and needs a hessian_product of"
                " its own"
            )
        with twice_differentiable(model.module):
            value, _ = self.forward(batch.inputs, batch.targets)
            if self.penalty is not None:
                value = value + self.penalty(self._w())
            slopes = torch.autograd.grad(
                value, model.shared, create_graph=True, materialize_grads=True
            )
            along = sum((s * u).sum() for s, u in zip(slopes, model.views(v), strict=True))
            if not (isinstance(along, Tensor) and along.requires_grad):  # the same everywhere
                return torch.zeros_like(v)
            pieces = torch.autograd.grad(along, model.shared, materialize_grads=True)
        return torch.cat([piece.reshape(-1) for piece in pieces])

    # ---- what all do --------------------------------------------------------------------------

    @property
    def own_gradient(self) -> bool:
        """Whether the class, or this problem, has another :meth:`gradient`."""
        return getattr(self.gradient, "__func__", None) is not Problem.gradient

    def full_gradient(self) -> Tensor:
        """Leave f's gradient on all samples in the parameters; return the loss, detached.

        Nothing else changes: running statistics and torch's generators stay as they were.
        Raises :class:`.NoFixedSamples` where the samples are drawn anew each time.
        """
        batch = self.data.whole
        with without_trace(self.model.shared[:1], self.model.module):
            return self.gradient(batch)[0]

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """Return the mean loss and accuracy of the module as it is, on all samples.

        Its modes are as before afterwards.
        """
        losses, sizes, kept = list[float](), list[int](), list[tuple[Any, Any]]()
        right, counted = 0.0, 0
        with evaluating(self.model.module), self.data.leaving_no_trace():
            for inputs, targets, samples in self.data.chunks():
                loss, outputs = self.forward(inputs, targets)
                losses.append(float(loss))
                sizes.append(samples)
                if (scores := scores_of(outputs)) is not None:
                    found = self.hits(scores, targets)
                    right, counted = right + float(found.right), counted + int(found.counted)
                if self.metrics is not None:
                    kept.append((outputs, targets))
        mean = float(np.average(losses, weights=sizes))
        if self.penalty is not None:
            mean += float(self.penalty(self.model.vector))
        accuracy = right / counted if counted else math.nan
        return Metrics(mean, accuracy, numbers_of(self.metrics, kept))

    def hits(self, scores: Tensor, targets: Any) -> Hits:
        """Return how many samples are right, and how many count."""
        return hits(scores, targets, getattr(self.loss, "ignore_index", None))

    def _w(self) -> Tensor:
        """Return the vector [d] through which gradients flow to the parameters."""
        return torch.cat([parameter.reshape(-1) for parameter in self.model.shared])

    def _lowered(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.model.device.type, self.autocast)


def of_type(targets: Any, outputs: Any) -> Any:
    """Return ``targets``; whole numbers that have the outputs' shape, in the outputs' type."""
    if not (isinstance(targets, Tensor) and isinstance(outputs, Tensor)):
        return targets
    if targets.shape != outputs.shape or targets.is_floating_point() or targets.is_complex():
        return targets
    return targets.to(outputs.dtype)


def into_training(module: nn.Module) -> None:
    """Put a module that is in evaluation mode as a whole into training mode."""
    if not module.training:
        module.train()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put the module into evaluation mode inside; its parts' modes are as before afterwards."""
    trained = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in trained:
            part.training = True


@contextmanager
def twice_differentiable(module: nn.Module) -> Iterator[None]:
    """Inside, passes have second derivatives: of fused attention, cuDNN's recurrent layers too."""
    cudnn, enabled = torch.backends.cudnn, torch.backends.cudnn.enabled
    if any(isinstance(part, nn.RNNBase) for part in module.modules()):
        cudnn.enabled = False  # ``cudnn.flags`` would set all flags
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        cudnn.enabled = enabled
