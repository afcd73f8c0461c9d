"""CUDA graphs on the emulated GPU: operators are recorded, and run again on the same tensors.

    with EmulatedGPU() as gpu, recorded_graphs(gpu) as made:
        ...  # torch.cuda.CUDAGraph and torch.cuda.graph work
    made  # the graphs that were captured

As on CUDA, a capture changes nothing that was there before it: not the model, not the generator.
What it allocates holds nothing until the first replay (here NaN). A replay reads and writes the
tensors of the capture, runs no Python code, and is one launch. Waiting for the GPU inside a capture
raises. Streams do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from emulated_gpu import READING, EmulatedGPU
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WRITTEN_UNSAID = {"native_batch_norm": (3, 4)}
"""Places of arguments that operators write to, which their schemas do not say."""


class RecordedGraph:
    """Stands in for ``torch.cuda.CUDAGraph``."""

    def __init__(self, gpu: EmulatedGPU) -> None:
        self.gpu, self.replays = gpu, 0
        self.launched: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        launches = self.gpu.launches
        with torch.no_grad():
            for func, args, kwargs, made in self.launched:
                again = func(*args, **kwargs)
                for mine, new in zip(tensors_in(made), tensors_in(again), strict=True):
                    if mine is not new:
                        mine.copy_(new)
        self.gpu.launches = launches + 1
        self.replays += 1


class Capture(TorchDispatchMode):
    """Stands in for ``torch.cuda.graph``."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._mine: dict[int, Tensor] = {}

    def __enter__(self) -> Capture:
        self._generator = self.graph.gpu.state
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.graph.gpu.state = self._generator
        with torch.no_grad():
            for tensor in self._mine.values():
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
            for tensor, value in self._before.values():
                tensor.copy_(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name.partition("::")[2]
        if name in READING:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        written = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written += [args[place] for place in WRITTEN_UNSAID.get(name, ())]
        for tensor in tensors_in(written):
            if (place := _place(tensor)) not in self._mine and place not in self._before:
                whole = _whole(tensor)
                self._before[place] = whole, whole.clone()
        made = func(*args, **kwargs)
        returns = func._schema.returns
        if not (returns and all(r.alias_info is not None for r in returns)) or written:
            self.graph.launched.append((func, args, kwargs, made))
        given = {_place(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(made):
            if _place(tensor) not in given:
                self._mine.setdefault(_place(tensor), _whole(tensor))
        return made


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _whole(tensor: Tensor) -> Tensor:
    """Return all of the tensor's storage."""
    with torch.no_grad():
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor.detach().as_strided((size,), (1,), 0)


@contextmanager
def recorded_graphs(gpu: EmulatedGPU) -> Iterator[list[RecordedGraph]]:
    """Let torch capture graphs on the emulated GPU; yield the list of those it makes."""
    made: list[RecordedGraph] = []

    def new_graph() -> RecordedGraph:
        made.append(RecordedGraph(gpu))
        return made[-1]

    stands_in = {
        "CUDAGraph": new_graph,
        "graph": Capture,
        "Stream": mock.Mock,
        "current_stream": mock.Mock,
        "stream": lambda stream: nullcontext(),
    }
    with ExitStack() as patches:
        for name, new in stands_in.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, new))
        yield made
