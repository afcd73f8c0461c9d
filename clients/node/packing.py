"""What travels between the in-process engine and its worker processes: tasks, and the app."""

from __future__ import annotations

import importlib
import io
import itertools
import mmap
import pickle
import tempfile
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp

from fl_strategies.core.reasons import of_exception
from fl_strategies.core.schedules import require
from fl_strategies.messages.encoding import copied


def app_of(client_app: ClientApp | str) -> ClientApp:
    """Return the ClientApp, or the one that ``"module:name"`` names."""
    if isinstance(client_app, str) and ":" in client_app:
        module, _, name = client_app.partition(":")
        client_app = getattr(importlib.import_module(module), name)
    wanted = "a ClientApp: clients.client_app(client_fn) makes one"
    require(isinstance(client_app, ClientApp), "client_app", wanted, client_app)
    return client_app  # type: ignore[return-value]


class Shared:
    """The records that several requests hold, as the global model, each with a key of its own."""

    _keys = itertools.count()

    def __init__(self, requests: Sequence[Message]) -> None:
        held = [request for request in requests if request.has_content()]
        records = [r for request in held for r in request.content.array_records.values()]
        counts = Counter(map(id, records))
        unique = {id(record): record for record in records if counts[id(record)] > 1}
        self.key_of = {name: next(self._keys) for name in unique}
        self.records = {self.key_of[name]: record for name, record in unique.items()}


class Task(pickle.Pickler):
    """Writes the keys of shared records, which are ``used`` then, in place of them."""

    def __init__(self, file: io.BytesIO, shared: Shared) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared, self.used = shared, set[int]()

    def persistent_id(self, obj: Any) -> int | None:
        key = self.shared.key_of.get(id(obj)) if type(obj) is ArrayRecord else None
        self.used |= {key} if key is not None else set()
        return key


class SharedUnpickler(pickle.Unpickler):
    """Reads shared records by their keys, each time as a new record of the same arrays."""

    def __init__(self, data: bytes, shared: dict[int, ArrayRecord]) -> None:
        super().__init__(io.BytesIO(data))
        self.shared = shared

    def persistent_load(self, pid: Any) -> ArrayRecord:
        return copied(self.shared[pid])


class PackedApp:
    """A ClientApp for other processes: ``data``, with its arrays in the unnamed ``file``."""

    def __init__(self, client_app: ClientApp | str) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self.file.close)
        if isinstance(client_app, str):
            self.data = pickle.dumps((client_app, []))
            return
        try:
            import cloudpickle
        except ImportError:
            raise ValueError(
                'workers need cloudpickle (pip install cloudpickle), or client_app as "module:name"'
            ) from None

        class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
            def reducer_override(self, obj: Any) -> Any:
                if type(obj) is torch.Tensor and not obj.requires_grad and _has_numpy(obj):
                    return torch.from_numpy, (obj.numpy(),)
                return super().reducer_override(obj)

        buffers: list[pickle.PickleBuffer] = []
        data = io.BytesIO()
        try:
            Pickler(data, protocol=5, buffer_callback=buffers.append).dump(client_app)
        except Exception as error:
            raise ValueError(
                f"client_app cannot be sent to worker processes: {of_exception(error)};"
                ' give it as "module:name"'
            ) from error
        sizes = []
        for buffer in buffers:
            raw = buffer.raw()
            sizes.append(raw.nbytes)
            self.file.write(raw)
            self.file.write(bytes(-raw.nbytes % 64))
        self.file.flush()
        self.data = pickle.dumps((data.getvalue(), sizes))


def _has_numpy(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16


def unpacked(file: int, data: bytes) -> ClientApp:
    """Return the ClientApp of a :class:`PackedApp`'s ``data`` and open ``file``."""
    app, sizes = pickle.loads(data)
    if isinstance(app, str):
        return app_of(app)
    buffers, start = [], 0
    if sizes:
        mapped = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_COPY))  # changes stay here
        for size in sizes:
            buffers.append(mapped[start : start + size])
            start += size + -size % 64
    client_app: ClientApp = pickle.loads(app, buffers=buffers)
    return client_app
