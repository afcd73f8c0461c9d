"""A torch module whose parameters are one vector."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from clients.learning.arrays import copy_into, numpy_type, to_host, to_numpy
from clients.learning.contiguous import contiguous_where_needed
from clients.learning.mistakes import check_module
from clients.learning.replay import Places
from clients.learning.sharing import Patterns, split
from fl_strategies.core.layout import Layout
from fl_strategies.core.schedules import require
from fl_strategies.core.spelling import hinted
from fl_strategies.messages.description import Description, digest, type_and_shape

T = TypeVar("T")


@hinted
class FlatModel:
    """A module whose trained parameters are views of one vector, and their gradients of another.

    Parameters
    ----------
    module : torch.nn.Module
        Changed in place: its trained parameters become views of ``vector``. Two names of one tied
        parameter stay tied.
    train : str or sequence of str, optional
        Patterns (:data:`.sharing.Patterns`) of the parameters that are trained: "head" for all of
        the module ``head``, "*lora_*" for adapters. Their ``requires_grad`` is set accordingly; by
        default the parameters that require gradients are trained. All other parameters are frozen:
        they do not travel, and clients whose frozen arrays differ from the server's are refused.
    share : str or sequence of str, optional
        Patterns of the arrays, buffers included, that travel; by default all except the frozen
        ones. Trained parameters and buffers that do not travel are each client's own: the local
        solver trains these parameters too, and the client's state holds both, so that clients need
        a store. FedPer shares all but the head (``share="!head"``), FedBN all but batch
        normalisation (``share=all_but(module, nn.BatchNorm2d)``).
    device : torch.device or str, optional
        The device that the module is moved to; by default the module stays where it is.
    dtype : torch.dtype, optional
        Type that the floating-point tensors get; by default they keep theirs. A bfloat16 model
        travels and is stored as float32, which holds each of its numbers; received numbers are
        rounded to bfloat16. So clients with bfloat16 and float32 models may share a run, if no
        parameter is frozen.
    head : str, optional
        Name of the submodule whose input is the model's features, for algorithms that use
        features; by default the ``nn.Linear`` that a forward pass runs last.

    Attributes
    ----------
    vector, gradient : Tensor [d]
        All trained parameters that travel, and their gradients (zero for a parameter that the loss
        does not reach). Convolution filters lie channels-last, which is faster; where a forward
        pass needs contiguous ones, it gets copies (``clients.learning.contiguous``).
    trained, trained_gradient : Tensor [d + l]
        The same, followed by the trained parameters that do not travel.
    names : list of str
        The arrays that travel, as in ``module.state_dict()``.
    buffers : tuple of str
        The arrays that travel and are not trained: running statistics and counters.
    kept : tuple of str
        The arrays, trained or not, that do not travel and are each client's own.
    shared : list of torch.nn.Parameter
        The trained parameters that travel, in the order of ``vector``.
    layout : fl_strategies.core.layout.Layout
        Names, shapes and types of the arrays that travel; which names are one tied parameter;
        digests of the frozen arrays.
    heads : list of torch.nn.Module
        Of these submodules, the one that a forward pass runs last gets the features.
    layout_options : dict
        The strategy's arguments ``buffers``, ``ties`` and ``frozen``, for a run that asks no
        client to describe its model: ``FedADMM(**model.layout_options)``, begun with
        ``ArrayRecord(model.state_dict())``.

    Raises
    ------
    ValueError
        If no parameter is trained and shared, if a trained one is not of a floating-point type, if
        their types differ, if a pattern matches nothing, or if ``head`` is unknown.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        train: Patterns | None = None,
        share: Patterns | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        head: str | None = None,
    ) -> None:
        check_module(module)
        typed = dtype is None or isinstance(dtype, torch.dtype)
        require(typed, "dtype", "a torch.dtype such as torch.float64", dtype)
        self.module = module.to(device=device, dtype=dtype)
        modules = dict(self.module.named_modules())
        if head is not None and head not in modules:
            raise ValueError(f"head must be one of the model's modules {[*modules]}, got {head!r}")
        self.heads = [
            submodule
            for name, submodule in modules.items()
            if name == head or (head is None and isinstance(submodule, nn.Linear))
        ]
        self._given: dict[str, Any] = {"train": train, "share": share, "head": head}
        roles = split(self.module, train, share)
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            if not parameter.is_floating_point():
                raise ValueError(f"parameter {name!r} has type {parameter.dtype}, not a float")
        if len(types := {str(parameter.dtype) for parameter in trained.values()}) > 1:
            raise ValueError(f"parameters have types {sorted(types)}: choose one by `dtype`")
        self.shared = [p for name, p in trained.items() if name in roles.shared]
        self._parameters = self.shared + [p for n, p in trained.items() if n in roles.local]
        self.trained = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self.trained_gradient = torch.zeros_like(self.trained)
        d = sum(parameter.numel() for parameter in self.shared)
        self.vector, self.gradient = self.trained[:d], self.trained_gradient[:d]
        self._values, self._slopes = self.views(self.trained), self.views(self.trained_gradient)
        for parameter, view in zip(self._parameters, self._values, strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self._attach_gradients()
        contiguous_where_needed(self.module)
        tensors = self.module.state_dict(keep_vars=True)
        self.names = [name for name in tensors if name in roles.travelling]
        self.buffers, self.kept = roles.buffers, roles.kept
        self._all = {name: tensor.detach() for name, tensor in tensors.items()}
        self._tensors = {name: self._all[name] for name in self.names}
        views = dict(zip(self._parameters, self._values, strict=True))
        self.places = Places(self.module, views, self._all)
        self._first = {name: to_numpy(self._all[name]).copy() for name in self.kept}
        self.layout = Layout(
            {name: tuple(tensor.shape) for name, tensor in self._tensors.items()},
            {name: numpy_type(tensor.dtype) for name, tensor in self._tensors.items()},
            frozenset(self.buffers),
            tuple(
                group
                for parameter in self.shared
                if len(group := tuple(n for n, t in tensors.items() if t is parameter)) > 1
            ),
            {name: digest(to_numpy(self._all[name])) for name in roles.frozen},
        )
        of = self.layout
        self.layout_options = {"buffers": self.buffers, "ties": of.ties, "frozen": of.frozen}

    def __reduce__(self) -> Any:  # a copy's parameters are views of its own vector
        return partial(type(self), **self._given), (self.module,), {"_first": self._first}

    @property
    def at_home(self) -> list[str]:
        """Names of the arrays that do not travel: the frozen ones and the client's own."""
        return [*self.layout.frozen, *self.kept]

    @property
    def description(self) -> Description:
        """All arrays of the module and their roles: what the server asks a few clients for."""
        layout = self.layout
        kinds = {n: type_and_shape(layout.dtypes[n], shape) for n, shape in layout.shapes.items()}
        own = layout.ties, layout.frozen, self.kept, kinds
        return Description(tuple(self._all), self.buffers, *own)

    @property
    def signature(self) -> str:
        """A digest of the layout and of what is each client's own."""
        own = [(name, self._all[name].shape) for name in self.kept]
        text = f"{self.layout.signature} {own}"
        return hashlib.sha256(text.encode()).hexdigest()[:16] if own else self.layout.signature

    def state_dict(self) -> dict[str, Tensor]:
        """Return the arrays that travel, as tensors on the CPU: for an ``ArrayRecord``.

        They are those of the module's ``state_dict``, with float32 for bfloat16, which NumPy lacks.
        """
        return {name: torch.from_numpy(to_numpy(t).copy()) for name, t in self._tensors.items()}

    def load(self, arrays: Sequence[npt.NDArray[Any]]) -> Tensor:
        """Copy ``arrays``, in the order of ``names``, into the model; return a copy of its vector.

        Raises ``ValueError`` for a wrong number of arrays, a wrong shape, or tied arrays that
        differ.
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
        received = dict(zip(self.names, arrays, strict=True))
        for other, first in self.layout.copies.items():
            if not np.array_equal(received[other], received[first], equal_nan=True):
                raise ValueError(
                    f"arrays {first!r} and {other!r} are one tied parameter of the client's model,"
                    " and two that differ were received"
                )
        self.places.take_in()
        copy_into([self._tensors[name] for name in received], [*received.values()])
        return self.vector.clone()

    def read(self, data: bytes) -> Tensor:
        """Return the vector [d] that ``Layout.to_bytes`` wrote; ``ValueError`` for another size."""
        vector = torch.empty_like(self.vector)
        copy_into(self.views(vector), self.layout.from_bytes(data))
        return vector

    def load_kept(self, arrays: Mapping[str, npt.NDArray[Any]] | None) -> None:
        """Put a client's own arrays into the model; None stands for the module's first values."""
        values = self._first if arrays is None else arrays
        copy_into([self._all[name] for name in self.kept], [values[name] for name in self.kept])

    def kept_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the client's own arrays, by name."""
        arrays = to_host([self._all[name] for name in self.kept])
        return dict(zip(self.kept, arrays, strict=True))

    def load_all(
        self, arrays: Sequence[npt.NDArray[Any]], extra_vectors: Sequence[str], algorithm: str
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Load the model; return its vector [d], and by name the ``extra_vectors``.

        An extra vector has an array for each trained parameter. Raises ``ValueError``, which names
        the ``algorithm``, for a wrong number of arrays.
        """
        own, trained = len(self.names), self.layout.trainable
        expected = own + len(trained) * len(extra_vectors)
        if len(arrays) != expected:
            parts = ", ".join(("the model", *extra_vectors))
            raise ValueError(
                f"{algorithm} takes {expected} arrays for {parts}; {len(arrays)} were"
                f" received. The client's model does not train {list(self.buffers[:3])}, has"
                f" the tied parameters {list(self.layout.ties[:3])} and does not send"
                f" {self.at_home[:3]}: is the run of a model like the client's, begun with"
                " ArrayRecord(module.state_dict())?"
            )
        further, vectors = iter(arrays[own:]), {}
        for name in extra_vectors:
            received = dict(zip(self.names, arrays[:own], strict=True))
            received |= {n: next(further) for n in trained}
            received |= {copy: received[n] for copy, n in self.layout.copies.items()}
            vectors[name] = self.load(list(received.values()))
        return self.load(arrays[:own]), vectors

    def all_arrays(self, vector: Tensor, further: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
        """Return the model's arrays, as :meth:`arrays` does, and those of ``further`` vectors."""
        return to_host(
            [*self._travelling(vector), *itertools.chain.from_iterable(map(self.views, further))]
        )

    def arrays(self, vector: Tensor) -> list[npt.NDArray[Any]]:
        """Return copies of the model's arrays, the trained ones taken from ``vector`` [d]."""
        return to_host(self._travelling(vector))

    def _travelling(self, vector: Tensor) -> list[Tensor]:
        views = dict(zip(self.layout.trainable, self.views(vector), strict=True))
        views |= {copy: views[first] for copy, first in self.layout.copies.items()}
        return [views.get(name, self._tensors[name]) for name in self.names]

    def with_features(
        self, forward: Callable[[Tensor, Tensor], T], x: Tensor, y: Tensor
    ) -> tuple[T, Tensor]:
        """Return ``forward(x, y)``, which runs the module on x [n, ...], and the features [n, p].

        The features come from this same pass: they have its dropout masks and carry gradients.
        Raises ``ValueError`` if the pass runs no head, or runs a head on other than n rows.
        """
        seen: list[Tensor] = []

        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen.append(inputs[0])

        hooks = [head.register_forward_pre_hook(note) for head in self.heads]
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

    def clear_gradients(self) -> None:
        """Forget all gradients, before a backward pass."""
        for parameter in self._parameters:
            parameter.grad = None

    def collect_gradients(self) -> None:
        """Collect the gradients of the backward passes since :meth:`clear_gradients`.

        A parameter that no pass reached has gradient 0. The parameters' ``grad`` become views of
        ``gradient``.
        """
        slopes = [parameter.grad for parameter in self._parameters]
        reached = [slope is not None for slope in slopes]
        if not all(reached):
            self.trained_gradient.zero_()
        dense = [s.to_dense() if s.is_sparse else s for s in slopes if s is not None]
        torch._foreach_copy_([*itertools.compress(self._slopes, reached)], dense)
        self._attach_gradients()

    def descend(self, rate: float) -> None:
        """Step by ``rate`` down the gradients of the backward passes since :meth:`clear_gradients`.

        A parameter that no pass reached stays as it is. The parameters' ``grad`` become views of
        ``gradient``, which does not change.
        """
        slopes = [parameter.grad for parameter in self._parameters]
        reached = [slope is not None for slope in slopes]
        dense = [s.to_dense() if s.is_sparse else s for s in slopes if s is not None]
        torch._foreach_add_([*itertools.compress(self._values, reached)], dense, alpha=-rate)
        self._attach_gradients()

    def _attach_gradients(self) -> None:
        for parameter, view in zip(self._parameters, self._slopes, strict=True):
            parameter.grad = view

    def views(self, vectors: Tensor) -> list[Tensor]:
        """Return the pieces of ``vectors``, [..., d] or [..., d + l], in the parameters' shapes.

        Convolution filters lie channels-last in the vectors.
        """
        whole, lead = vectors.shape[-1] != len(self.vector), vectors.shape[:-1]
        of = self._parameters if whole else self.shared
        views = []
        pieces = torch.split(vectors, [parameter.numel() for parameter in of], -1)
        for piece, parameter in zip(pieces, of, strict=True):
            if parameter.dim() == 4:
                outputs, inputs, height, width = parameter.shape
                views.append(piece.view((*lead, outputs, height, width, inputs)).movedim(-1, -3))
            else:
                views.append(piece.view((*lead, *parameter.shape)))
        return views
