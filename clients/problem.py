"""A torch model, a loss and tensors as one function of one vector."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clients.replay import without_trace
from fl_strategies.layout import Layout

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``loss(outputs, targets)``: the mean over the examples of a batch, a scalar tensor."""

T = TypeVar("T")

CHUNK = 1000
"""Examples per forward pass where a whole data set is run through the model."""


class FlatModel:
    """A module whose trainable parameters are views of one vector, and their gradients of another.

    Parameters
    ----------
    module : torch.nn.Module
        Changed in place: its parameters become views of ``vector``. A parameter with
        ``requires_grad=False`` counts as a buffer. Two names of one tied parameter stay tied.
    device : torch.device or str, optional
        Where the module is moved; by default it stays.
    dtype : torch.dtype, optional
        Type its floating-point tensors get; by default they keep theirs.
    head : str, optional
        Name of the submodule whose input are the model's features, for algorithms that look at
        them; by default the ``nn.Linear`` that a forward pass runs last.

    Attributes
    ----------
    vector, gradient : Tensor [d]
        All trainable parameters; all their gradients (zero where a batch reached none).
        Convolution filters lie channels-last in them, as convolutions run faster on.
    names : list of str
        The arrays that travel, as in ``module.state_dict()``.
    buffers : tuple of str
        Those of them that are not trained.
    layout : fl_strategies.layout.Layout
        Their names, shapes and types.

    Raises
    ------
    ValueError
        If no parameter is trainable, one is not of a floating-point type, or their types differ;
        for an unknown ``head``.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        head: str | None = None,
    ) -> None:
        self.module = module.to(device=device, dtype=dtype)
        modules = dict(self.module.named_modules())
        if head is not None and head not in modules:
            raise ValueError(f"head must be one of the model's modules {[*modules]}, got {head!r}")
        self._heads = [
            submodule
            for name, submodule in modules.items()
            if name == head or (head is None and isinstance(submodule, nn.Linear))
        ]
        trainable = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError("the model has no trainable parameter")
        for name, parameter in trainable.items():
            if not parameter.is_floating_point():
                raise ValueError(f"parameter {name!r} has type {parameter.dtype}, not a float")
        if len(types := {str(parameter.dtype) for parameter in trainable.values()}) > 1:
            raise ValueError(f"parameters have types {sorted(types)}: choose one by `dtype`")
        self._parameters = list(trainable.values())
        self.vector = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self.gradient = torch.zeros_like(self.vector)
        for parameter, view in zip(self._parameters, self._views(self.vector), strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self.attach_gradients()
        tensors = self.module.state_dict(keep_vars=True)
        ids = {id(parameter) for parameter in trainable.values()}
        self.names = list(tensors)
        self.buffers = tuple(name for name, tensor in tensors.items() if id(tensor) not in ids)
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.layout = Layout(
            {name: tuple(tensor.shape) for name, tensor in self._tensors.items()},
            {name: tensor.cpu().numpy().dtype for name, tensor in self._tensors.items()},
            frozenset(self.buffers),
        )

    def load(self, arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
        """Copy ``arrays``, in the order of ``names``, into the model; return its vector [d], new.

        Raises ``ValueError`` for a wrong number of arrays, or a wrong shape.
        """
        if len(arrays) != len(self.names):
            raise ValueError(
                f"the client's model has {len(self.names)} arrays, {len(arrays)} were received"
            )
        for name, array in zip(self.names, arrays, strict=True):
            tensor = self._tensors[name]
            if tuple(tensor.shape) != tuple(array.shape):
                raise ValueError(
                    f"array {name!r} of the client's model has shape {tuple(tensor.shape)},"
                    f" {tuple(array.shape)} was received"
                )
        with torch.no_grad():
            for name, array in zip(self.names, arrays, strict=True):
                # a copy when read-only (bytes from the wire): torch wants writable memory
                source = array if array.flags.writeable else array.copy()
                self._tensors[name].copy_(torch.from_numpy(source))
        return self.vector.clone()

    def arrays(self, vector: Tensor) -> list[npt.NDArray[Any]]:
        """Return the model's arrays with the trainable ones out of ``vector`` [d], as copies."""
        present = self.vector.clone()
        self.vector.copy_(vector)
        arrays = [self._tensors[name].cpu().numpy().copy() for name in self.names]
        self.vector.copy_(present)
        return arrays

    def with_features(
        self, forward: Callable[[Tensor, Tensor], T], x: Tensor, y: Tensor
    ) -> tuple[T, Tensor]:
        """Return ``forward(x, y)``, which runs the module on x [n, ...], and the features [n, p].

        They come from that very pass, with its dropout masks, and carry its gradients. Raises
        ``ValueError`` if it ran no head, or one on another number of rows than n.
        """
        seen: list[Tensor] = []

        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen.append(inputs[0])

        hooks = [head.register_forward_pre_hook(note) for head in self._heads]
        try:
            result = forward(x, y)
        finally:
            for hook in hooks:
                hook.remove()
        if not seen or len(seen[-1]) != len(x):
            rows = f"{len(seen[-1])} rows for {len(x)} inputs" if seen else "no nn.Linear that runs"
            raise ValueError(
                f"features are the input of the model's last linear layer, and it has {rows}:"
                " name the module whose input they are by FlatModel(module, head=...)"
            )
        return result, seen[-1].flatten(1).to(self.vector.dtype)

    def hessian_product(self, value: Tensor, v: Tensor) -> Tensor:
        """Return ``v`` [d] times the second derivative of ``value``, a scalar that has a graph."""
        slopes = torch.autograd.grad(
            value, self._parameters, create_graph=True, materialize_grads=True
        )
        along = torch.stack(
            [(slope * u).sum() for slope, u in zip(slopes, self._views(v), strict=True)]
        ).sum()
        pieces = torch.autograd.grad(along, self._parameters, materialize_grads=True)
        product = torch.zeros_like(self.vector)
        for view, piece in zip(self._views(product), pieces, strict=True):
            view.copy_(piece)
        return product

    def attach_gradients(self) -> None:
        """Make the parameters' gradients views of ``gradient`` (``zero_grad`` takes them away)."""
        for parameter, view in zip(self._parameters, self._views(self.gradient), strict=True):
            parameter.grad = view

    def _views(self, vector: Tensor) -> list[Tensor]:
        """Return the pieces of ``vector`` in the parameters' shapes, filters channels-last."""
        sizes = [parameter.numel() for parameter in self._parameters]
        views = []
        for piece, parameter in zip(torch.split(vector, sizes), self._parameters, strict=True):
            if parameter.dim() == 4:
                outputs, inputs, height, width = parameter.shape
                views.append(piece.view(outputs, height, width, inputs).permute(0, 3, 1, 2))
            else:
                views.append(piece.view(parameter.shape))
        return views


class Metrics(NamedTuple):
    """Mean loss and share of right answers (NaN where targets are no classes) over examples."""

    loss: float
    accuracy: float


class Problem:
    """f(w) = mean loss of a model with parameters w on ``inputs`` [n, ...], ``targets`` [n, ...].

    Parameters
    ----------
    model : FlatModel
        Shared: several problems may use one model, each loads what it needs.
    loss : callable
        ``loss(outputs, targets)``, the mean over a batch.
    inputs, targets : Tensor
        Placed on the model's device; floating-point inputs get the model's type. Integer inputs
        (characters, tokens) are stored as they come and reach the module as int64, which
        embeddings ask for. Images [n, channels, height, width] are stored channels-last, which
        convolutions run faster on.
    penalty : callable, optional
        ``penalty(vector)``, a scalar added to the loss (a regulariser of w).
    autocast : torch.dtype, optional
        Runs the forward pass in this lower precision (``torch.autocast``); w stays as it is.

    Raises
    ------
    ValueError
        If there is no example, or numbers of inputs and targets differ.
    """

    def __init__(
        self,
        model: FlatModel,
        loss: Loss,
        inputs: Tensor,
        targets: Tensor,
        *,
        penalty: Callable[[Tensor], Tensor] | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        if len(inputs) == 0 or len(inputs) != len(targets):
            raise ValueError(
                f"a problem needs as many inputs as targets and at least one,"
                f" got {len(inputs)} and {len(targets)}"
            )
        self.model, self.loss, self.penalty, self.autocast = model, loss, penalty, autocast
        device = model.vector.device
        dtype = model.vector.dtype if inputs.is_floating_point() else inputs.dtype
        self._format = torch.channels_last if inputs.dim() == 4 else torch.contiguous_format
        self.inputs = inputs.to(device=device, dtype=dtype).contiguous(memory_format=self._format)
        self.targets = targets.to(device=device)
        self._batch_norms = [
            module
            for module in model.module.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def classifies(self) -> bool:
        """Whether targets are classes, so that there is an accuracy."""
        return not self.targets.is_floating_point()

    def on(self, inputs: Tensor, targets: Tensor) -> Problem:
        """Return this problem on other examples: a mini-batch that :meth:`batches` yields."""
        other = copy.copy(self)
        other.inputs, other.targets = inputs, targets
        return other

    def batches(self, rng: np.random.Generator, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one epoch of mini-batches in an order drawn from ``rng``; 0 is one full batch.

        The last batch is as large as what remains, one example at the least.
        """
        if batch_size == 0 or batch_size >= len(self):
            yield self.inputs, self.targets
            return
        order = torch.from_numpy(rng.permutation(len(self))).to(self.inputs.device)
        inputs = self.inputs[order].contiguous(memory_format=self._format)
        targets = self.targets[order]
        for start in range(0, len(self), batch_size):
            yield inputs[start : start + batch_size], targets[start : start + batch_size]

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return how many of the outputs are right, as a scalar tensor."""
        return (outputs.argmax(1) == targets).sum()

    def gradient(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Put f's gradient on a batch into ``model.gradient``; return loss and outputs, detached.

        A batch of one example runs BatchNorm layers on their running statistics, since it has no
        variance of its own. Batches above ``CHUNK`` examples go through in pieces. The module must
        be in training mode, with its gradients attached.
        """
        self.model.gradient.zero_()
        with self._normalising(inputs):
            if len(inputs) <= CHUNK:
                value, outputs = self._forward(inputs, targets)
                value.backward()  # type: ignore[no-untyped-call]
                loss, outputs = value.detach(), outputs.detach()
            else:
                loss, pieces = torch.zeros_like(self.model.vector[0]), []
                # even pieces, so that none has one example, which BatchNorm cannot normalise
                count = math.ceil(len(inputs) / CHUNK)
                chunks = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
                for x, y in chunks:
                    value, outputs = self._forward(x, y)
                    value = value * (len(x) / len(inputs))
                    value.backward()  # type: ignore[no-untyped-call]
                    loss = loss + value.detach()
                    pieces.append(outputs.detach())
                outputs = torch.cat(pieces)
        if self.penalty is not None:
            w = self.model.vector.detach().requires_grad_()
            value = self.penalty(w)
            self.model.gradient.add_(torch.autograd.grad(value, w)[0])
            loss = loss + value.detach()
        return loss, outputs

    def hessian_product(self, inputs: Tensor, targets: Tensor, v: Tensor) -> Tensor:
        """Return f's Hessian on a batch times ``v`` [d]: exact, by differentiating the gradient.

        As for :meth:`gradient`, the module must be in training mode; batches above ``CHUNK``
        examples and those of one are treated as there.
        """
        model, product = self.model, torch.zeros_like(self.model.vector)
        recurrent = any(isinstance(module, nn.RNNBase) for module in model.module.modules())
        count = math.ceil(len(inputs) / CHUNK)
        for x, y in zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True):
            # fused attention and cuDNN's recurrent layers have no second derivatives
            with (
                self._normalising(inputs),
                sdpa_kernel(SDPBackend.MATH),
                torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext(),
            ):
                value, _ = self._forward(x, y)
            product += len(x) / len(inputs) * model.hessian_product(value, v)
        if self.penalty is not None:
            w = model.vector.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.penalty(w), w, create_graph=True)
            product += torch.autograd.grad(slope.dot(v), w)[0]
        return product

    def full_gradient(self) -> Tensor:
        """Put f's gradient on all examples into ``model.gradient``; return the loss, detached.

        Otherwise without effect: running statistics and torch's generators stay as they were.
        """
        with without_trace([self.model.vector], self.model.module):
            loss, _ = self.gradient(self.inputs, self.targets)
        return loss

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """Return mean loss and accuracy of the present parameters on all examples."""
        self.model.module.eval()
        loss, right = 0.0, 0
        for start in range(0, len(self), CHUNK):
            x, y = self.inputs[start : start + CHUNK], self.targets[start : start + CHUNK]
            value, outputs = self._forward(x, y)
            loss += float(value) * len(x)
            if self.classifies:
                right += int(self.right(outputs, y))
        mean = loss / len(self)
        if self.penalty is not None:
            mean += float(self.penalty(self.model.vector))
        return Metrics(mean, right / len(self) if self.classifies else float("nan"))

    @contextmanager
    def _normalising(self, inputs: Tensor) -> Iterator[None]:
        """Let BatchNorm use its running statistics where a batch has but one example."""
        alone = self._batch_norms if len(inputs) == 1 else []
        for module in alone:
            module.eval()
        try:
            yield
        finally:
            for module in alone:
                module.train()

    def _forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x if x.is_floating_point() else x.long()
        if self.autocast is None:
            outputs = self.model.module(x)
        else:
            with torch.autocast(x.device.type, self.autocast):
                outputs = self.model.module(x)
            outputs = outputs.to(self.model.vector.dtype)
        return self.loss(outputs, y), outputs
