"""Forward passes of modules that need contiguous activations.

A :class:`.FlatModel` stores convolution filters channels-last, and a :class:`.Problem` images,
which makes convolutions faster. The activations are channels-last then, and PyTorch cannot view
those as vectors: ``x.view(len(x), -1)`` raises an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from clients.learning.replay import Before
from fl_strategies.core.log import log_once

VIEW_ERROR = "view size is not compatible with input tensor's size and stride"
"""How PyTorch's message begins."""
Kind: TypeAlias = tuple[Any, ...]


class Forward:
    """The forward pass of a module, in place of ``module.forward``.

    A pass that fails with PyTorch's view error is repeated on contiguous copies of filters and
    images, as the module has them elsewhere; torch's generators and the module's buffers are as
    before the failure. Later passes on inputs of this kind (mode, shapes) use such copies at once.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None = None) -> None:
        self._module, self._own = weakref.ref(module), own
        self._contiguous: dict[Kind, bool] = {}

    def __reduce__(self) -> Any:  # a copy of the module has its own
        return Forward, (self._module(), self._own)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward pass, whose signature this one has."""
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward pass no longer exists")
        return self._own or MethodType(type(module).forward, module)

    def __getattr__(self, name: str) -> Any:  # torch.export reads the code's
        return getattr(self.__wrapped__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.__wrapped__
        module: Any = self._module()
        kind: Kind = ()
        contiguous: bool | None
        if torch.compiler.is_compiling() or torch._C._get_tracing_state():  # shapes are not numbers
            contiguous = any(self._contiguous.values())
        else:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            batched = any(map(is_batchedtensor, tensors))
            kind = (module.training, batched, *(tensor.shape for tensor in tensors))
            contiguous = self._contiguous.get(kind)
        if not contiguous:
            before = Before(module) if contiguous is None else None
            try:
                outputs = forward(*args, **kwargs)
            except RuntimeError as error:
                if VIEW_ERROR not in str(error):
                    raise
            else:
                self._contiguous[kind] = False
                return outputs
            if before is not None:
                before.restore()
        with _contiguous_filters(module):
            args = tuple(map(_contiguous, args))
            outputs = forward(*args, **{name: _contiguous(value) for name, value in kwargs.items()})
        if not contiguous:
            self._contiguous[kind] = True
            log_once(
                f"{type(module).__name__} views activations that are not contiguous: it computes"
                " on contiguous filters and images, as outside FlatModel"
            )
        return outputs


def contiguous_where_needed(module: nn.Module) -> None:
    """Let ``module``'s forward pass be a :class:`Forward`, unless all layers are PyTorch's.

    PyTorch's own layers take activations as they lie. A TorchScript module stays as it is: the code
    that it runs cannot be replaced.
    """
    own = vars(module).get("forward")
    plain = all(type(part).__module__.startswith("torch.nn.") for part in module.modules())
    scripted = isinstance(module, torch.jit.ScriptModule)
    if not (plain or scripted or isinstance(own, Forward)):
        module.forward = Forward(module, own)


@contextmanager
def _contiguous_filters(module: nn.Module) -> Iterator[None]:
    """Inside, contiguous copies, through which gradients flow, replace channels-last filters."""
    filters = [
        (part._parameters, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter.dim() == 4
    ]
    copies = {id(parameter): _contiguous(parameter) for _, _, parameter in filters}
    for parameters, name, parameter in filters:
        parameters[name] = copies[id(parameter)]
    try:
        yield
    finally:
        for parameters, name, parameter in filters:
            parameters[name] = parameter


def _contiguous(value: Any) -> Any:
    """Return a contiguous copy of filters or images; anything else as it is.

    ``Tensor.contiguous`` would keep the strides of 1x1 filters, which PyTorch takes for
    channels-last.
    """
    images = isinstance(value, Tensor) and value.dim() == 4
    return value.clone(memory_format=torch.contiguous_format) if images else value
