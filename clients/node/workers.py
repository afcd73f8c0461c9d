"""Worker processes that call the ClientApp: all cores for the in-process engine, without Ray.

A request is a task for the next worker that is free. The node's context travels with it and comes
back with the reply, so a node is bound to no process, and results are the same to the bit for any
number of workers.
"""

from __future__ import annotations

import io
import itertools
import logging
import mmap
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from logging import WARNING
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NamedTuple

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.node.host import members_of
from clients.node.packing import PackedApp, Shared, SharedUnpickler, Task, unpacked
from fl_strategies.core.log import FLOWER, LOGGER, log
from fl_strategies.core.reasons import of_exception
from fl_strategies.messages.one_process import become_server, error_reply

AHEAD = 2
"""Tasks that a worker has at a time: it begins the next while its last reply is read."""


class Done(NamedTuple):
    """A request that was answered; ``context`` holds the state after it, of each client."""

    request: Message
    reply: Message
    context: Context


class Workers:
    """``count`` processes that hold a copy of the ClientApp.

    They end with this process, and when this object is deleted. Of a ClientApp that is passed as an
    object, arrays and tensors on the CPU lie in a file that all workers map into their memory; each
    writes into its own copy. One that is passed as ``"module:name"`` is imported by each.
    """

    def __init__(self, client_app: ClientApp | str, count: int) -> None:
        if os.name != "posix":
            raise ValueError(f"workers must be 1 on {sys.platform}, got {count}")
        self.count, self._app = count, PackedApp(client_app)
        self._who_said: dict[str, int] = {}
        self._workers: list[_Worker] = []
        weakref.finalize(self, _stop, self._workers)
        self._start()

    def _start(self) -> None:
        for number in range(len(self._workers), self.count):
            self._workers.append(_Worker(number, self._app))

    def replies_to(
        self, requests: Sequence[Message], context_of: Callable[[Message], Context]
    ) -> Iterator[Done]:
        """Yield each request as it is answered; a node works on one at a time.

        ``context_of`` is called when a worker takes the request. If a worker dies, the reply to
        what it was working on is an error, and another worker starts. Raises ``RuntimeError`` if a
        worker cannot start.
        """
        self._start()
        waiting, at_work = deque(requests), set[int]()
        shared = Shared(requests)
        try:
            while waiting or at_work:
                self._assign(waiting, at_work, context_of, shared)
                ready = {id(end) for end in wait([worker.connection for worker in self._workers])}
                for place, worker in enumerate(self._workers):
                    if id(worker.connection) not in ready:
                        continue
                    try:
                        done = self._read(worker)
                    except (EOFError, OSError):
                        done = worker.lost_task()
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
        shared: Shared,
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
        """Log the worker's lines; return what it did, or None if it has just started."""
        answer = worker.answer()
        for name, level, text in answer.log:
            if self._who_said.setdefault(text, worker.number) == worker.number:
                logging.getLogger(name).log(level, "%s", text)
        if answer.failed:
            raise RuntimeError(f"a worker process cannot start: {answer.failed}")
        if answer.reply is None:
            worker.started = True
            return None
        request, context = worker.tasks.popleft()
        for client, state in zip(members_of(context), answer.states, strict=True):
            client.state = state
        return Done(request, answer.reply, context)


class _Answer(NamedTuple):
    """What a worker sends; without reply and failure, it has started."""

    log: list[tuple[str, int, str]]
    reply: Message | None = None
    states: Sequence[RecordDict] = ()
    failed: str = ""


class _Worker:
    """A process, as the engine sees it."""

    def __init__(self, number: int, app: PackedApp) -> None:
        self.number, self.started = number, False
        self.tasks: deque[tuple[Message, Context]] = deque()
        self._has = set[int]()
        self._replies = deque(memory_file() for _ in range(AHEAD + 1))
        files = [file.fileno() for file in self._replies]
        in_app = app.file.fileno()
        here, there = socket.socketpair()
        with there:
            paths = [path or os.getcwd() for path in sys.path]
            program = f"from {__name__} import work; work({there.fileno()}, {files}, {in_app})"
            command = [sys.executable, "-P", "-c", program]
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
            }
            self.process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[there.fileno(), *files, in_app],
                stdin=subprocess.DEVNULL,
            )
        self.connection = Connection(here.detach())
        levels = {logger.name: logger.level for logger in (FLOWER, LOGGER)}
        self.connection.send(levels)
        self.connection.send_bytes(app.data)

    def give(self, request: Message, context: Context, shared: Shared) -> None:
        """Send a task; the first with a shared record brings it, later ones its key."""
        self.tasks.append((request, context))
        task = Task(data := io.BytesIO(), shared)
        task.dump((request, context))
        new = {key: shared.records[key] for key in task.used - self._has}
        self._has = task.used | (self._has & shared.records.keys())
        with suppress(OSError):  # if it died, its connection says so
            self.connection.send((new, self._has, data.getvalue()))

    def answer(self) -> _Answer:
        """Return what the worker sent; a reply lies in the next of its files."""
        size: int = self.connection.recv()
        with mmap.mmap(self._replies[0].fileno(), size, access=mmap.ACCESS_READ) as data:
            answer: _Answer = pickle.loads(data)
        self._replies.rotate(-1)
        return answer

    def lost_task(self) -> Done | None:
        """Return an error for what the worker was working on; the rest stays in ``tasks``."""
        self.close()
        code = self.process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if not self.started:
            raise RuntimeError(f"a worker process ended at its start: {how}")
        log(WARNING, "a worker process died (%s); another one starts", how)
        if not self.tasks:
            return None
        request, context = self.tasks.popleft()
        return Done(request, error_reply(request, f"the worker process died ({how})"), context)

    def close(self) -> None:
        """Close what leads to the process."""
        self.connection.close()
        for file in self._replies:
            file.close()


def memory_file() -> IO[bytes]:
    """Return a new file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("replies"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.close()
        worker.process.kill()
    for worker in workers:
        worker.process.wait()


def _node(request: Message) -> int:
    return int(request.metadata.dst_node_id)


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


def work(file: int, replies: Sequence[int], in_app: int) -> None:
    """Answer the engine's tasks until it closes the connection, which is the open ``file``.

    The ClientApp's arrays lie in ``in_app``. Answers are written into the files ``replies`` by
    turns. One more than ``AHEAD`` are enough for the engine to have read what is overwritten.
    """
    connection = Connection(file)
    turns = itertools.cycle([open(place, "r+b") for place in replies])  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's process gets it, and ends us
    become_server()
    torch.set_num_threads(1)

    def send(answer: _Answer) -> None:
        place = next(turns)
        place.seek(0)
        pickle.dump(answer, place, pickle.HIGHEST_PROTOCOL)  # arrays go into the file at once
        place.flush()
        connection.send(place.tell())

    heard = _Heard(connection.recv())
    try:
        app = unpacked(in_app, connection.recv_bytes())
    except Exception as error:
        send(_Answer([], failed=of_exception(error)))
        return
    send(_Answer([]))
    for request, context in _tasks(connection):
        try:
            reply = app(request, context)
        except Exception as error:
            reply = error_reply(request, of_exception(error))
        states = [client.state for client in members_of(context)]
        send(_Answer(heard.taken(), reply, states))


def _tasks(connection: Connection) -> Iterator[tuple[Message, Context]]:
    """Yield the tasks. They are read in a thread, so that who sends does not wait for who works."""
    read: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                read.put(connection.recv())
        except (EOFError, OSError):
            read.put(None)

    threading.Thread(target=receive, daemon=True).start()
    shared: dict[int, ArrayRecord] = {}
    while (task := read.get()) is not None:
        new, has, data = task
        shared = {key: new[key] if key in new else shared[key] for key in has}
        yield SharedUnpickler(data, shared).load()
