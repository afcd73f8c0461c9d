"""Worker processes that call the ClientApp: all cores for the in-process engine, without Ray.

A request is a task for the next worker that is free. The node's context travels with it and comes
back with the reply, so a node is bound to no process, and results are the same to the bit for any
number of workers.
"""

from __future__ import annotations

import importlib
import io
import itertools
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from logging import WARNING
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from clients.node.records import become_server
from fl_strategies.core.log import FLOWER, LOGGER, log
from fl_strategies.core.reasons import of_exception
from fl_strategies.core.schedules import require

AHEAD = 2
"""Tasks that a worker has at a time: it begins the next while its last reply is read."""


class Done(NamedTuple):
    """A request that was answered; ``context`` holds the node's state after it."""

    request: Message
    reply: Message
    context: Context


def app_of(client_app: ClientApp | str) -> ClientApp:
    """Return the ClientApp, or the one that ``"module:name"`` names."""
    if isinstance(client_app, str) and ":" in client_app:
        module, _, name = client_app.partition(":")
        client_app = getattr(importlib.import_module(module), name)
    wanted = 'a ClientApp (clients.client_app(client_fn) makes one), or "module:name" of one'
    require(isinstance(client_app, ClientApp), "client_app", wanted, client_app)
    return client_app  # type: ignore[return-value]


class Workers:
    """``count`` processes that hold a copy of the ClientApp.

    They end with this process, and when this object is gone. Of a ClientApp that is given as an
    object, arrays and tensors on the CPU lie in a file that all workers map into their memory; each
    writes into its own copy. One that is given as ``"module:name"`` is imported by each.
    """

    def __init__(self, client_app: ClientApp | str, count: int) -> None:
        if os.name != "posix":
            raise ValueError(f"workers must be 1 on {sys.platform}, got {count}")
        self.count, self._app = count, _Packed(client_app)
        self._who_said: dict[str, int] = {}
        self._workers: list[_Worker] = []
        weakref.finalize(self, _stop, self._workers)
        self._start()

    def _start(self) -> None:
        for number in range(len(self._workers), self.count):
            self._workers.append(_Worker(number, self._app))

    def answers(
        self, requests: Sequence[Message], context_of: Callable[[Message], Context]
    ) -> Iterator[Done]:
        """Yield each request as it is answered; a node works on one at a time.

        ``context_of`` is called when a worker takes the request. If a worker dies, the reply to
        what it was working on is an error, and another worker starts. Raises ``RuntimeError`` if a
        worker cannot start.
        """
        self._start()
        waiting, at_work = deque(requests), set[int]()
        shared = _Shared(requests)
        try:
            while waiting or at_work:
                self._assign(waiting, at_work, context_of, shared)
                ready = {id(found) for found in wait([w.connection for w in self._workers])}
                for place, worker in enumerate(self._workers):
                    if id(worker.connection) not in ready:
                        continue
                    try:
                        done = self._read(worker)
                    except (EOFError, OSError):
                        done = worker.died()
                        waiting.extendleft(request for request, _ in reversed(worker.tasks))
                        at_work -= {_node(request) for request, _ in worker.tasks}
                        self._workers[place] = _Worker(worker.number, self._app)
                    if done is not None:
                        at_work.discard(_node(done.request))
                        yield done
        except BaseException:  # answers to come would be taken for those to later requests
            _stop(self._workers)
            self._workers.clear()
            raise

    def _assign(
        self,
        waiting: deque[Message],
        at_work: set[int],
        context_of: Callable[[Message], Context],
        shared: _Shared,
    ) -> None:
        """Give free workers what is waiting, in order; those with least to do first."""
        for load in range(AHEAD):
            for worker in self._workers:
                if len(worker.tasks) > load:
                    continue
                free = (i for i, request in enumerate(waiting) if _node(request) not in at_work)
                place = next(free, None)
                if place is None:
                    return
                request = waiting[place]
                del waiting[place]
                at_work.add(_node(request))
                worker.give(request, context_of(request), shared)

    def _read(self, worker: _Worker) -> Done | None:
        """Log what the worker said; return what it did, or None if it has just started."""
        answer = worker.connection.recv()
        for name, level, text in answer.log:
            if self._who_said.setdefault(text, worker.number) == worker.number:
                logging.getLogger(name).log(level, "%s", text)
        if answer.failed:
            raise RuntimeError(f"a worker process cannot start: {answer.failed}")
        if answer.reply is None:
            worker.started = True
            return None
        request, context = worker.tasks.popleft()
        context.state = answer.state
        return Done(request, answer.reply, context)


class _Answer(NamedTuple):
    """What a worker sends; without reply and failure, it has started."""

    log: list[tuple[str, int, str]]
    reply: Message | None = None
    state: Any = None
    failed: str = ""


class _Worker:
    """A process, as the engine sees it."""

    def __init__(self, number: int, app: _Packed) -> None:
        self.number, self.started = number, False
        self.tasks: deque[tuple[Message, Context]] = deque()
        self._has = set[int]()
        here, there = socket.socketpair()
        with there:
            paths = [path or os.getcwd() for path in sys.path]
            program = f"from {__name__} import work; work({there.fileno()})"
            command = [sys.executable, "-P", "-c", program]
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
            }
            self.process = subprocess.Popen(
                command, env=environment, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL
            )
        self.connection = Connection(here.detach())
        levels = {logger.name: logger.level for logger in (FLOWER, LOGGER)}
        self.connection.send((app.path, levels))
        self.connection.send_bytes(app.data)

    def give(self, request: Message, context: Context, shared: _Shared) -> None:
        """Send a task; the first with a shared record brings it, later ones its key."""
        self.tasks.append((request, context))
        task = _Task(data := io.BytesIO(), shared)
        task.dump((request, context))
        new = {key: shared.records[key] for key in task.used - self._has}
        self._has = task.used | (self._has & shared.records.keys())
        with suppress(OSError):  # if it died, its connection says so
            self.connection.send((new, self._has))
            self.connection.send_bytes(data.getbuffer())

    def died(self) -> Done | None:
        """Return an error for what the worker was working on; the rest stays in ``tasks``."""
        self.connection.close()
        code = self.process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if not self.started:
            raise RuntimeError(f"a worker process ended at its start: {how}")
        log(WARNING, "a worker process died (%s); another one starts", how)
        if not self.tasks:
            return None
        request, context = self.tasks.popleft()
        error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"the worker process died ({how})")
        return Done(request, Message(error, reply_to=request), context)


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
        worker.process.kill()
    for worker in workers:
        worker.process.wait()


def _node(request: Message) -> int:
    return int(request.metadata.dst_node_id)


# ---- what travels -------------------------------------------------------------------------------


class _Shared:
    """The records that several requests hold, as the global model, each with a key of its own."""

    _keys = itertools.count()

    def __init__(self, requests: Sequence[Message]) -> None:
        held = [request for request in requests if request.has_content()]
        records = [r for request in held for r in request.content.array_records.values()]
        counts = Counter(map(id, records))
        unique = {id(record): record for record in records if counts[id(record)] > 1}
        self.key_of = {name: next(self._keys) for name in unique}
        self.records = {self.key_of[name]: record for name, record in unique.items()}


class _Task(pickle.Pickler):
    """Writes the keys of shared records, which are ``used`` then, in place of them."""

    def __init__(self, file: io.BytesIO, shared: _Shared) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared, self.used = shared, set[int]()

    def persistent_id(self, obj: Any) -> int | None:
        key = self.shared.key_of.get(id(obj)) if isinstance(obj, ArrayRecord) else None
        self.used |= {key} if key is not None else set()
        return key


class _Given(pickle.Unpickler):
    """Reads shared records by their keys, each time as a new record of the same arrays."""

    def __init__(self, data: bytes, shared: dict[int, ArrayRecord]) -> None:
        super().__init__(io.BytesIO(data))
        self.shared = shared

    def persistent_load(self, pid: Any) -> ArrayRecord:
        return ArrayRecord(dict(self.shared[pid]))


class _Packed:
    """A ClientApp for other processes: ``data``, whose arrays lie in the file ``path``."""

    def __init__(self, client_app: ClientApp | str) -> None:
        self.path = ""
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
        if buffers:
            with tempfile.NamedTemporaryFile(prefix="client-app-", delete=False) as file:
                self.path = file.name
                weakref.finalize(self, os.unlink, file.name)
                for buffer in buffers:
                    raw = buffer.raw()
                    sizes.append(raw.nbytes)
                    file.write(raw)
                    file.write(bytes(-raw.nbytes % 64))
        self.data = pickle.dumps((data.getvalue(), sizes))


def _has_numpy(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype not in (torch.bfloat16,)


def _unpacked(path: str, data: bytes) -> ClientApp:
    app, sizes = pickle.loads(data)
    if isinstance(app, str):
        return app_of(app)
    buffers, start = [], 0
    if path:
        mapped = np.memmap(path, np.uint8, mode="c")  # changes stay in this process
        for size in sizes:
            buffers.append(mapped[start : start + size].data)
            start += size + -size % 64
    found: ClientApp = pickle.loads(app, buffers=buffers)
    return found


# ---- in the worker ------------------------------------------------------------------------------


class _Heard(logging.Handler):
    """Keeps what is logged for the engine's process."""

    def __init__(self, levels: dict[str, int]) -> None:
        super().__init__()
        self.lines: list[tuple[str, int, str]] = []
        for name, level in levels.items():
            logger = logging.getLogger(name)
            logger.handlers[:], logger.propagate = [self], False
            logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.name, record.levelno, record.getMessage()))

    def taken(self) -> list[tuple[str, int, str]]:
        """Return the lines since the last call."""
        lines, self.lines = self.lines, []
        return lines


def work(file: int) -> None:
    """Answer the engine's tasks until it closes the connection, which is this open file."""
    connection = Connection(file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's process gets it, and ends us
    become_server()
    torch.set_num_threads(1)
    path, levels = connection.recv()
    heard = _Heard(levels)
    try:
        app = _unpacked(path, connection.recv_bytes())
    except Exception as error:
        connection.send(_Answer([], failed=of_exception(error)))
        return
    connection.send(_Answer([]))
    for request, context in _tasks(connection):
        try:
            reply = app(request, context)
        except Exception as error:
            reply = Message(
                Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, of_exception(error)), reply_to=request
            )
        connection.send(_Answer(heard.taken(), reply, context.state))


def _tasks(connection: Connection) -> Iterator[tuple[Message, Context]]:
    """Yield the tasks. They are read in a thread, so that who sends does not wait for who works."""
    read: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                read.put((connection.recv(), connection.recv_bytes()))
        except (EOFError, OSError):
            read.put(None)

    threading.Thread(target=receive, daemon=True).start()
    shared: dict[int, ArrayRecord] = {}
    while (task := read.get()) is not None:
        (new, has), data = task
        shared = {key: new[key] if key in new else shared[key] for key in has}
        yield _Given(data, shared).load()
