"""A client's loss as a function of one vector, for any kind of data."""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from clients.learning import passes
from clients.learning.drawn import NoFixedSamples
from clients.learning.mistakes import in_loss, in_shapes, in_targets
from clients.learning.model import FlatModel
from clients.learning.passes import (
    Batch,
    Inputs,
    called,
    even_pieces,
    ignored_by,
    judged,
    of_one_value,
    right_of_each,
    second_derivative,
    twice_differentiable,
)
from clients.learning.pieces import Piece, add_up, backward_in_pieces, loss_on, numbers_of
from clients.learning.replay import without_trace
from fl_strategies.core.records import NOTHING
from fl_strategies.solvers.local import LocalTraining

Loss: TypeAlias = Callable[[Any, Tensor], Tensor]
"""``loss(outputs, targets)``: the mean over the samples of a batch, a scalar tensor."""
Penalty: TypeAlias = Callable[[Tensor], Tensor]
Measure: TypeAlias = Callable[[Any, Tensor], Mapping[str, float]]
Move: TypeAlias = Callable[[], object]
"""Changes the model's vector in place."""


class Metrics(NamedTuple):
    """Mean loss and accuracy over samples; NaN is the accuracy where targets are no classes."""

    loss: float
    accuracy: float
    others: Mapping[str, float] = NOTHING
    """What :class:`Objective`'s ``metrics`` returned."""


class Objective(abc.ABC):
    """f(w) = mean loss of a model with parameters w over a client's samples.

    A subclass for a kind of data says how the data are cut into mini-batches. What it cannot do
    raises a ``ValueError`` that gives the reason.

    Parameters
    ----------
    model : FlatModel
        Several problems may share one model: each loads the parameters that it needs.
    loss : callable
        ``loss(outputs, targets)``, the mean over a batch, where ``outputs`` are what the module
        returns. Of a record with ``logits``, as those of transformers are, they are the logits.
        Batches above ``CHUNK`` samples, and test samples, pass through the model in pieces: the
        loss is still that of all outputs at once, unless their shapes differ from piece to piece.
        There is an accuracy where outputs are [n, classes, ...] and targets, integers, [n, ...], as
        ``torch.nn.functional.cross_entropy`` takes them. Targets equal to ``loss.ignore_index``, or
        -100 where the loss has none, do not count in it.
    penalty : callable, optional
        ``penalty(vector)``, a scalar added to the loss (a regulariser of w).
    autocast : torch.dtype, optional
        Runs the forward pass in this lower precision (``torch.autocast``); w stays as it is.
    metrics : callable, optional
        ``metrics(outputs, targets)`` of all samples at once, numbers by name. A client's ``test``
        reports a number ``f1`` as ``eval-f1`` of the global and ``own-f1`` of the personalized
        model, each the mean over clients, weighted by samples. NaN is left out.
    """

    def __init__(
        self,
        model: FlatModel,
        loss: Loss,
        *,
        penalty: Penalty | None = None,
        autocast: torch.dtype | None = None,
        metrics: Measure | None = None,
    ) -> None:
        self.model, self.loss, self.penalty, self.autocast = model, loss, penalty, autocast
        self.metrics = metrics
        self._whole: bool | None = None  # whether evaluation needs the loss on all samples at once
        self.batch_norms = [
            module
            for module in model.module.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]

    # ---- what a kind of data adds -----------------------------------------------------------

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples, which is the client's weight."""

    @property
    @abc.abstractmethod
    def classifies(self) -> bool:
        """Whether targets are classes, so that there is an accuracy."""

    @abc.abstractmethod
    def batches(self, rng: np.random.Generator, batch_size: int) -> Iterator[Batch]:
        """Yield one epoch of mini-batches in an order drawn from ``rng``; size 0 is the full batch.

        The last batch holds the remaining samples, at least one.
        """

    @abc.abstractmethod
    def chunks(self) -> Iterator[Batch]:
        """Yield all samples, in their order, in pieces."""

    @property
    def whole(self) -> Batch:
        """All samples as one batch; raises :class:`NoFixedSamples` where there is none."""
        raise NoFixedSamples(
            f"a {type(self).__name__} has no fixed samples: they are drawn anew each time"
        )

    def draws(self, rng: np.random.Generator, samples: int) -> Iterator[Batch]:
        """Yield endless batches of ``samples`` samples, drawn with replacement."""
        raise NoFixedSamples(
            f"a {type(self).__name__} has no fixed samples, from which some could be drawn"
        )

    def planned(self, training: LocalTraining) -> int:
        """Return how many mini-batches ``training`` makes of an epoch."""
        return training.batches(len(self))

    def most_steps(self, training: LocalTraining) -> float:
        """Return the most local steps that ``training`` may take."""
        return training.most_steps(len(self))

    def outputs(self, inputs: Inputs) -> Any:
        """Return what the module returns for a batch; of a record with logits these."""
        if self.autocast is None:
            return called(self.model.module, inputs)
        with torch.autocast(self.model.vector.device.type, self.autocast):
            outputs = called(self.model.module, inputs)
        return outputs.to(self.model.vector.dtype) if isinstance(outputs, Tensor) else outputs

    def forward(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Any]:
        """Return the mean loss on a batch, without penalty, and the outputs."""
        outputs = self.outputs(inputs)
        if mistake := in_shapes(outputs, targets, self.loss):
            raise ValueError(mistake)
        try:
            loss = self.loss(outputs, targets)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            if mistake := in_targets(outputs, targets):
                raise ValueError(mistake) from error
            raise
        if mistake := in_loss(loss, trains=torch.is_grad_enabled()):
            raise ValueError(mistake)
        return loss, outputs

    def right(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int | Tensor]:
        """Return how many samples are right, by :func:`right_of_each`, and how many count."""
        ignored = ignored_by(self.loss)
        right = right_of_each(outputs, targets, ignored)
        counts = (targets != ignored).flatten(1).any(1) if targets.dim() > 1 else targets != ignored
        return torch.where(counts, right, 0).sum(), counts.sum()

    # ---- what all kinds do ------------------------------------------------------------------

    def on(self, inputs: Inputs, targets: Tensor) -> Objective:
        """Return this loss on other samples: a mini-batch that :meth:`batches` yields."""
        return OneBatch(self, inputs, targets)

    def gradient(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Put f's gradient on a batch into ``model.gradient``; return loss and outputs, detached.

        On a batch of one sample, BatchNorm layers that get one value per channel, which has no
        variance, use their running statistics. Batches above ``CHUNK`` samples go through the model
        in pieces, each of which BatchNorm normalises by itself. The module must be in training
        mode.
        """
        loss, outputs = self._backward(inputs, targets)
        self.model.collect_gradients()
        if self.penalty is not None:
            w = self.model.vector.detach().requires_grad_()
            value = self.penalty(w)
            self.model.gradient.add_(torch.autograd.grad(value, w)[0])
            loss = loss + value.detach()
        return loss, outputs

    @property
    def own_gradient(self) -> bool:
        """Whether the class, or this problem, has another :meth:`gradient`."""
        return getattr(self.gradient, "__func__", None) is not Objective.gradient

    @property
    def is_loss_of_outputs(self) -> bool:
        """Whether the mean loss is ``loss`` alone, to which a class adds nothing."""
        return type(self).forward is Objective.forward

    @property
    def descends(self) -> bool:
        """Whether :meth:`descend` can replace :meth:`gradient` and a step along it."""
        return self.penalty is None and not self.own_gradient

    def descend(
        self, inputs: Inputs, targets: Tensor, rate: float, also: Move | None = None
    ) -> tuple[Tensor, Tensor]:
        """Step by ``rate`` down f's gradient on a batch; return what :meth:`gradient` returns.

        The step is the one along ``model.gradient``, which does not change, in float32 and float64
        to the bit. ``also`` moves the vector further, between the gradient and the step.
        """
        loss, outputs = self._backward(inputs, targets)
        if also is not None:
            also()
        self.model.descend(rate)
        return loss, outputs

    def _backward(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Leave the gradient on a batch in the parameters; return loss and outputs, detached."""
        self.model.clear_gradients()
        with self._normalising(len(targets)):
            if len(targets) > passes.CHUNK:
                loss, outputs = backward_in_pieces(self, inputs, targets)
            else:
                loss, outputs = self.forward(inputs, targets)
                torch.autograd.backward(loss)
        self.model.places.take_in()
        return loss.detach(), judged(outputs, targets).detach()

    def hessian_product(self, inputs: Inputs, targets: Tensor, v: Tensor) -> Tensor:
        """Return f's Hessian on a batch times ``v`` [d]: exact, by differentiating the gradient.

        As for :meth:`gradient`, the module must be in training mode; batches of one sample and
        batches above ``CHUNK`` samples are treated alike, except that the loss on the latter is the
        mean over pieces. Raises ``ValueError`` where the gradient is the class's own, whose
        derivative this is not.
        """
        if self.own_gradient and type(self).hessian_product is Objective.hessian_product:
            raise ValueError(
                f"{type(self).__name__} has a gradient of f of its own, and needs a hessian_product"
                " of its own"
            )
        model, product = self.model, torch.zeros_like(self.model.vector)
        for x, y in even_pieces(inputs, targets):
            with self._normalising(len(targets)), twice_differentiable(model.module):
                value, _ = self.forward(x, y)
            product += len(y) / len(targets) * second_derivative(model, value, v)
        if self.penalty is not None:
            w = model.vector.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.penalty(w), w, create_graph=True)
            if slope.requires_grad:  # else it is the same everywhere
                product += torch.autograd.grad(slope.dot(v), w)[0]
        return product

    def full_gradient(self) -> Tensor:
        """Put f's gradient on all samples into ``model.gradient``; return the loss, detached.

        Nothing else changes: running statistics and torch's generators stay as they were.
        Raises :class:`NoFixedSamples` where the samples are drawn anew each time.
        """
        inputs, targets = self.whole
        with without_trace([self.model.vector], self.model.module):
            loss, _ = self.gradient(inputs, targets)
        return loss

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """Return the mean loss and accuracy of the model as it is, on all samples."""
        self.model.module.eval()
        right, counted = 0.0, 0
        losses, sizes, pieces = list[float](), list[int](), list[Piece]()
        for x, y in self.chunks():
            value, outputs = self.forward(x, y)
            losses.append(float(value))
            sizes.append(len(y))
            if self.classifies:
                some, of = self.right(judged(outputs, y), y)
                right, counted = right + float(some), counted + int(of)
            if self._whole is not False or self.metrics is not None:
                pieces.append(Piece(value, outputs, y))
            if self._whole is None and len(pieces) > 1:
                if not add_up(self, pieces[-2:]):
                    self._whole = True
                    return self.evaluate()
                if self.metrics is None:
                    del pieces[0]
        mean = sum(map(operator.mul, losses, sizes)) / sum(sizes)
        if self._whole and (whole := loss_on(self, pieces)) is not None:
            mean = float(whole)
        elif math.isfinite(mean) and not math.isclose(min(losses), max(losses), rel_tol=0.01):
            self._whole = False  # of equal losses it cannot be known
        if self.penalty is not None:
            mean += float(self.penalty(self.model.vector))
        accuracy = right / counted if counted else math.nan
        return Metrics(mean, accuracy, numbers_of(self.metrics, pieces))

    def _normalising(self, samples: int) -> AbstractContextManager[None]:
        """Let BatchNorm use its running statistics on a sample with one value per channel."""
        if samples > 1 or not self.batch_norms:
            return nullcontext()
        return of_one_value(self.batch_norms)


class OneBatch(Objective):
    """The loss of another problem on one batch: this batch is the whole data set."""

    def __init__(self, of: Objective, inputs: Inputs, targets: Tensor) -> None:
        self.model, self.loss, self.penalty, self.autocast = of.model, of.loss, of.penalty, None
        self.batch_norms, self._whole, self.metrics = of.batch_norms, None, None
        self._of, self._inputs, self._targets = of, inputs, targets

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def classifies(self) -> bool:
        return self._of.classifies

    @property
    def whole(self) -> Batch:
        return self._inputs, self._targets

    def batches(self, rng: np.random.Generator, batch_size: int) -> Iterator[Batch]:
        yield self.whole

    def chunks(self) -> Iterator[Batch]:
        yield self.whole

    def forward(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Any]:
        return self._of.forward(inputs, targets)

    def gradient(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self._of.gradient(inputs, targets)

    def hessian_product(self, inputs: Inputs, targets: Tensor, v: Tensor) -> Tensor:
        return self._of.hessian_product(inputs, targets, v)

    @property
    def own_gradient(self) -> bool:
        return self._of.own_gradient

    def right(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int | Tensor]:
        return self._of.right(outputs, targets)
