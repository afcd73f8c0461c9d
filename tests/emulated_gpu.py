"""A GPU that is not there: device mistakes, seen on a machine without one.

    with EmulatedGPU() as gpu:
        ...  # torch sees one GPU, "cuda"
    gpu.launches, gpu.to_host, gpu.to_device, gpu.reads

Every tensor stays in the CPU's memory. A storage that was put on the GPU is marked, and since views
share their storage the mark follows them, through autograd too. A TorchDispatchMode sees every
operator: one whose operands lie on both sides raises as CUDA does, results of marked operands are
marked, and random operators on them draw from a generator of the GPU's own, which the functions of
``torch.cuda`` read, set and seed. As both sides compute alike, a run on the emulated GPU ends in
the CPU's model to the bit unless something forgot where it was.

It counts ``launches`` (operators on the GPU, but for views), copies ``to_host`` and ``to_device``,
and ``reads`` of a value that the host has to wait for. It does not see the numerics of CUDA's
kernels, its memory, streams, or a second GPU. ``kind`` may be any type of device whose module has
the functions that ``torch.cuda`` has ("xpu", "mps").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simulations import client_app
from simulations.config import RunConfig

CPU = torch.device("cpu")
WITHOUT_KERNEL = {
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "detach", "detach_", "empty",
    "empty_like", "empty_strided", "is_same_size", "lift_fresh", "new_empty", "new_empty_strided",
    "resize_", "set_",
}  # fmt: skip
"""Operators that start nothing on a GPU, beside views."""
READING = {
    "_local_scalar_dense", "_unique2", "allclose", "equal", "is_nonzero", "item", "masked_select",
    "nonzero", "unique_dim",
}  # fmt: skip
"""Operators whose result depends on values, so that the host waits for the GPU."""
BY_INDEX = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
"""Operators that take indices from the host."""


class EmulatedGPU(TorchDispatchMode):
    """Inside, torch sees one device of type ``kind`` beside the CPU."""

    def __init__(self, kind: str = "cuda") -> None:
        super().__init__()
        self.device = torch.device(kind, 0)
        self.state = torch.Generator().manual_seed(0).get_state()
        self.free = 1 << 36
        self.launches = self.to_host = self.to_device = self.reads = 0
        self.by_name: Counter[str] = Counter()
        self._patches = ExitStack()
        self._inside = False

    @property
    def syncs(self) -> int:
        """How often the host waited: for a copy or for a value."""
        return self.to_host + self.to_device + self.reads

    def __enter__(self) -> EmulatedGPU:
        for patch in self._what_python_sees():
            self._patches.enter_context(patch)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patches.close()

    # ---- operators ----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._inside:
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made_here = False
        if kwargs.get("device") is not None:
            made_here = torch.device(kwargs["device"]).type == self.device.type
            kwargs["device"] = CPU
        here = [t for t in operands if on_gpu(t)]
        if name == "copy_":
            self._count_copy(args[0], args[1])
            return func(*args, **kwargs)
        self._check(func, name, args, operands, here)
        drawn = (bool(here) or made_here) and torch.Tag.nondeterministic_seeded in func.tags
        with self._own_generator() if drawn else ExitStack():
            result = func(*args, **kwargs)
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if here or made_here:
            for tensor in results:
                mark(tensor)
            self._count(func, name, args, results or here)
        elif not operands and torch._C._current_graph_task_id() != -1:
            # zeros that autograd makes where its graph lies: here it takes that for the CPU
            for tensor in results:
                tensor.untyped_storage().belongs_anywhere = True
        return result

    def _check(
        self, func: Any, name: str, args: Any, operands: list[Tensor], here: list[Tensor]
    ) -> None:
        """Raise ``RuntimeError`` for operands on both sides, where CUDA does."""
        there = [t for t in operands if not on_gpu(t) and not _belongs_anywhere(t)]
        if not here or not there:
            return
        if name in BY_INDEX and on_gpu(args[0]):
            given = [index for index in args[1] if index is not None]
            if all(any(t is index for index in given) for t in there):
                self.to_device += len(there)  # CUDA copies an index, and the host waits
                return
        written = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        into_host = any(isinstance(t, Tensor) and not on_gpu(t) for t in tree_leaves(written))
        if into_host or any(t.dim() for t in there):
            shapes = [tuple(t.shape) for t in there]
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices,"
                f" {self.device} and cpu! (operator {name}, shapes on the CPU {shapes})"
            )

    def _count(self, func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
        reads = name in READING
        if name in BY_INDEX:  # a mask has to be counted first
            reads = any(t is not None and t.dtype == torch.bool for t in args[1])
        if reads:
            self.reads += 1
            self.by_name[f"read {name}"] += 1
        outputs = func._schema.returns
        view = bool(outputs) and all(
            o.alias_info is not None and not o.alias_info.is_write for o in outputs
        )
        if not view and name not in WITHOUT_KERNEL and any(t.numel() for t in tensors):
            self.launches += 1
            self.by_name[name] += 1

    def _count_copy(self, to: Tensor, source: Tensor) -> None:
        if on_gpu(to) and on_gpu(source):
            self.launches += 1
            self.by_name["copy_"] += 1
        elif on_gpu(to):
            self.to_device += 1
        elif on_gpu(source):
            self.to_host += 1

    @contextmanager
    def _own_generator(self) -> Iterator[None]:
        host = torch.default_generator.get_state()
        torch.default_generator.set_state(self.state)
        try:
            yield
        finally:
            self.state = torch.default_generator.get_state()
            torch.default_generator.set_state(host)

    # ---- what Python sees ---------------------------------------------------------------------

    def _what_python_sees(self) -> list[Any]:
        kind = self.device.type
        numpy, tolist, autocast = Tensor.numpy, Tensor.tolist, torch.autocast

        def to_numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if on_gpu(tensor):
                raise TypeError(
                    f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu()"
                )
            return numpy(tensor, *args, **kwargs)

        def to_list(tensor: Tensor) -> Any:
            self.to_host += on_gpu(tensor)
            return tolist(tensor)

        def seed(value: int) -> None:
            self.state = torch.Generator().manual_seed(value).get_state()

        def set_state(state: Tensor, device: Any = None) -> None:
            self.state = state.clone()

        of_tensors: dict[str, Any] = {
            "device": property(lambda t: self.device if on_gpu(t) else CPU),
            f"is_{kind}": property(on_gpu),
            "is_cpu": property(lambda t: not on_gpu(t)),
            "get_device": lambda t: 0 if on_gpu(t) else -1,
            "to": self._mover(Tensor.to),
            "cpu": lambda t, *a, **k: t.to("cpu"),
            kind: lambda t, *a, **k: t.to(self.device),
            "numpy": to_numpy,
            "tolist": to_list,
            "new_tensor": lambda t, data: torch.tensor(data, dtype=t.dtype).to(t.device),
        }
        of_module: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "mem_get_info": lambda device=None: (self.free, self.free),
            "current_device": lambda: 0,
            "is_current_stream_capturing": lambda: False,
            "_lazy_init": lambda: None,
            "get_rng_state": lambda device=None: self.state.clone(),
            "set_rng_state": set_state,
            "manual_seed": seed,
            "manual_seed_all": seed,
        }
        patches = [
            mock.patch.object(Tensor, name, new, create=True) for name, new in of_tensors.items()
        ]
        module = getattr(torch, kind)
        patches += [
            mock.patch.object(module, name, new)
            for name, new in of_module.items()
            if hasattr(module, name)
        ]
        patches += [
            mock.patch.object(torch.backends.cudnn, "is_acceptable", return_value=False),
            mock.patch.object(
                torch,
                "autocast",
                lambda where, *a, **k: autocast("cpu" if where == kind else where, *a, **k),
            ),
            *(mock.patch.object(torch, n, _made_on_the_host(n)) for n in ("tensor", "as_tensor")),
        ]
        optimizer = torch.optim.Optimizer
        checks = [n for n in vars(optimizer) if n.endswith("_graph_capture_health_check")]
        patches += [mock.patch.object(optimizer, name) for name in checks]
        return patches

    def _mover(self, plain: Any) -> Any:
        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            wanted, others = kwargs.pop("device", None), []
            for value in args:
                if isinstance(value, str | torch.device):
                    wanted = value
                elif isinstance(value, Tensor):
                    wanted = value.device
                    others.append(value.dtype)
                elif value is not None and not isinstance(value, bool):
                    others.append(value)
            goes = None if wanted is None else torch.device(wanted).type
            if goes is not None and (goes == self.device.type) != on_gpu(tensor):
                tensor = self._moved(tensor)
            if others or kwargs:
                moved: Tensor = plain(tensor, *others, **kwargs)
                return moved
            return tensor

        return to

    def _moved(self, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor`` on the other side."""
        self.to_host += on_gpu(tensor)
        self.to_device += not on_gpu(tensor)
        self._inside = True
        try:
            copy = tensor.clone()
        finally:
            self._inside = False
        return copy if on_gpu(tensor) else mark(copy)


def on_gpu(tensor: Any) -> bool:
    """Return whether the emulated GPU holds ``tensor``."""
    return tensor.layout is torch.strided and getattr(tensor.untyped_storage(), "on_gpu", False)


def mark(tensor: Tensor) -> Tensor:
    """Put the tensor's storage on the emulated GPU, as it stands; return the tensor."""
    tensor.untyped_storage().on_gpu = True
    return tensor


def _belongs_anywhere(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "belongs_anywhere", False)


def _made_on_the_host(name: str) -> Any:
    """Return torch's function that makes tensors of values, which may not ask for CUDA here."""
    plain = getattr(torch, name)

    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made: Tensor = plain(data, *args, **kwargs)
        return made if device is None else made.to(device)

    return make


def on_a_client(config: RunConfig) -> None:
    context = mock.Mock(run_config=config.to_run_config(), node_config={"partition-id": 0})
    client_app.client_fn(context)
