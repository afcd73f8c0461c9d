"""A node of several clients: one message is about all of them; each has its state and failures.

``client_app(client_fn, hosts=...)`` makes a node a host; ``fl_strategies.messages.hosting`` says
what its messages hold. The same ``client_fn`` makes the clients: it gets a context with the
client's ``partition-id`` and the client's own ``state``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from logging import DEBUG
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.client import NumPyClient

from clients.node.records import (
    ClientFn,
    check_id,
    check_names,
    described,
    divided,
    log_failure,
    make_client,
)
from clients.stacking.choice import Setting
from clients.stacking.fit import fit_all
from fl_strategies import STRATEGIES
from fl_strategies.core.log import log
from fl_strategies.core.reasons import by_reason, named, of_exception
from fl_strategies.core.records import BadReply
from fl_strategies.core.schedules import plain
from fl_strategies.messages.codes import CODEC
from fl_strategies.messages.codes import received as received_of
from fl_strategies.messages.encoding import recorded, stacked
from fl_strategies.messages.folding import Folder, Terms
from fl_strategies.messages.hosting import Report, fold_of, pack_reply, unpack_request

Arrays: TypeAlias = list[npt.NDArray[Any]]
Config: TypeAlias = dict[str, Any]
Fitted: TypeAlias = tuple[Arrays, int, dict[str, Any]]
"""What ``NumPyClient.fit`` returns: arrays like those received, number of samples, metrics."""


class Hosted(NamedTuple):
    """The clients that a node hosts, and each client's number of samples, for spreading work.

    Examples
    --------
    >>> Hosted([3, 4], samples=[100, 50]).clients
    [3, 4]
    """

    clients: Sequence[int] | int
    samples: Sequence[int] = ()


Hosts: TypeAlias = Sequence[int] | int | Hosted | None
"""The ids of a node's clients; or a number N, for any of 0, ..., N - 1 of a population that all
hosts share; or either with numbers of samples (:class:`Hosted`). None: the node is one client.
"""

STATE = "client"
"""Prefix of the keys of a client's records in its host's ``context.state``: ``client-7/...``."""


class HostContext(Context):
    """A host's context, in an engine that keeps a context for each client (``InProcessGrid``)."""

    fetch: Callable[[int], Context]
    """Returns a client's context before it works."""
    keep: Callable[[Context], None]
    """Takes a client's context back after it worked."""


class TravellingContext(HostContext):
    """A host's context for another process, with those of the clients that it is asked for."""

    def __init__(self, host: Context, clients: dict[int, Context]) -> None:
        super().__init__(host.run_id, host.node_id, host.node_config, host.state, host.run_config)
        self.clients = clients

    def __reduce__(self) -> Any:  # the run-config once
        host = (self.run_id, self.node_id, self.node_config, self.state, self.run_config)
        clients = {c: (its.node_config, its.state) for c, its in self.clients.items()}
        return _arrived, (host, clients)

    def fetch(self, client: int) -> Context:
        """Return a client's context."""
        return self.clients[client]

    def keep(self, context: Context) -> None:
        """Do nothing: all states travel back."""


def _arrived(host: Any, clients: Mapping[int, tuple[Any, RecordDict]]) -> TravellingContext:
    run, _, _, _, run_config = host
    contexts = {c: Context(run, c, *its, dict(run_config)) for c, its in clients.items()}
    return TravellingContext(Context(*host), contexts)


def members_of(context: Context) -> list[Context]:
    """Return the contexts of the clients with which a context travels, or itself."""
    return [*context.clients.values()] if isinstance(context, TravellingContext) else [context]


@dataclass(frozen=True)
class Host:
    """The clients of one node, each made by ``client_fn``.

    ``clients`` are their ids, or the size of a shared population, of which the node runs any.
    ``stack`` says how many are trained at once (:mod:`clients.stacking`).
    """

    client_fn: ClientFn
    clients: Sequence[int] | int
    samples: Sequence[int] = ()
    stack: Setting = "off"

    @property
    def about(self) -> dict[str, Any]:
        """Return the host's answer to a query."""
        about: dict[str, Any] = {}
        if isinstance(self.clients, int):
            about["any-of"] = self.clients
        else:
            ids = [plain(client) for client in self.clients]
            if strange := [client for client in ids if type(client) is not int]:
                raise ValueError(f"ids of clients are integers, a host has {strange[:5]}")
            about["client-ids"] = ids
        if len(self.samples):
            about["samples"] = [int(count) for count in self.samples]
        return about

    @cached_property
    def _hosted(self) -> Container[int]:
        return range(self.clients) if isinstance(self.clients, int) else {*self.clients}

    def train(self, message: Message, context: Context) -> RecordDict:
        """Return the reply to a training request about several clients."""
        started = time.monotonic()
        record, configs = unpack_request(message.content)
        arrays = received_of(record, next(iter(configs.values()), {}))
        names = list(record)
        with self._clients(configs, names, context) as (clients, failed):
            asked = [configs[client] for client in clients]
            fitted = fit_all([*clients.values()], arrays, asked, stack=self.stack)
        good: dict[int, Fitted] = {}
        for client, result in zip(clients, fitted, strict=True):
            try:
                good[client] = _like(names, arrays, result)
            except Exception as error:
                failed[client] = error
        reports = {c: Report(*divided(n, m, configs[c])) for c, (_, n, m) in good.items()}
        if terms := fold_of(message.content):
            sent = {client: fitted[0] for client, fitted in good.items()}
            agreed = Terms.of(terms)
            received = dict(zip(names, arrays, strict=True))
            folder = Folder(agreed, received, _weight_in(agreed.algorithm, clients.values()))
            mean, taken, refused = _folded(folder, reports, sent)
            reasons = self._reasons(failed) | refused
            seconds = time.monotonic() - started
            return pack_reply(taken, reasons, mean, seconds, folded=True, refused=[*refused])
        columns = zip(names, zip(*(uploaded for uploaded, _, _ in good.values()), strict=True),
                      strict=False)  # fmt: skip
        uploads = ArrayRecord({name: stacked(column, len(good)) for name, column in columns})
        return pack_reply(reports, self._reasons(failed), uploads, time.monotonic() - started)

    def evaluate(self, message: Message, context: Context) -> RecordDict:
        """Return the reply to an evaluation request about several clients."""
        started = time.monotonic()
        record, configs = unpack_request(message.content)
        arrays = received_of(record, next(iter(configs.values()), {}))
        reports: dict[int, Report] = {}
        with self._clients(configs, list(record), context) as (clients, failed):
            for number, client in clients.items():
                try:
                    config = configs[number]
                    loss, samples, metrics = client.evaluate(arrays, config)
                    told = divided(samples, {"eval-loss": loss, **metrics}, config)
                    reports[number] = Report(*told)
                except Exception as error:
                    failed[number] = error
        return pack_reply(reports, self._reasons(failed), seconds=time.monotonic() - started)

    @contextmanager
    def _clients(
        self, asked: Mapping[int, Config], names: list[str], context: Context
    ) -> Iterator[tuple[dict[int, NumPyClient], dict[int, Exception]]]:
        """Yield the requested clients by id, and the errors of those that could not be made.

        At the end their states are kept.
        """
        made: dict[int, NumPyClient] = {}
        failed: dict[int, Exception] = {}
        with _states(context, shared=isinstance(self.clients, int)) as context_of:
            for client in asked:
                try:
                    numpy_client = self._made(client, context_of)
                    check_names(numpy_client, names)
                    made[client] = numpy_client
                except Exception as error:
                    failed[client] = error
            yield made, failed

    def _made(self, client: int, context_of: Callable[[int], Context]) -> NumPyClient:
        """Return a client; raise ``ValueError`` if the node does not host it."""
        if client not in self._hosted:
            raise ValueError(f"this node does not host client {client}, but {_few(self.clients)}")
        context = context_of(client)
        return check_id(make_client(self.client_fn, context), context)

    def describe(self, client: int, context: Context) -> dict[str, Any]:
        """Return the client's description of its model."""
        with _states(context, shared=isinstance(self.clients, int)) as context_of:
            return described(self._made(client, context_of))

    def _reasons(self, failed: Mapping[int, Exception]) -> dict[int, str]:
        """Return why clients failed; the host's own log gets a line for each distinct reason."""
        reasons = {client: of_exception(error) for client, error in failed.items()}
        for reason, clients in by_reason(reasons.items()).items():
            log_failure(named(clients), reason)
        for client, error in failed.items():
            log(DEBUG, "client %d failed", client, exc_info=error)
        return reasons


def _weight_in(algorithm: str, clients: Iterable[Any]) -> Callable[..., float]:
    """Return the weight of an upload in ``algorithm``: its strategy's, or that of its clients.

    Raises ``ValueError`` if neither is known here.
    """
    of_clients = (getattr(client, "weight", None) for client in clients)
    strategy = STRATEGIES.get(algorithm)
    weight = strategy.weight if strategy else next(filter(None, of_clients), None)
    if weight is None:
        raise ValueError(
            f"no weight of {algorithm!r} is known here, by which uploads would be averaged: give"
            ' its client class the attribute `weight`, or its strategy fold="off"'
        )
    return weight


def _folded(
    folder: Folder, reports: Mapping[int, Report], uploads: Mapping[int, Arrays]
) -> tuple[ArrayRecord | None, dict[int, Report], dict[int, str]]:
    """Return the mean of the used uploads (None without any), who sent them, and faults."""
    taken: dict[int, Report] = {}
    refused: dict[int, str] = {}
    for client, report in reports.items():
        try:
            arrays = dict(zip(folder.received, uploads[client], strict=True))
            further = folder.take(client, report.numbers, report.words, arrays)
            taken[client] = report._replace(numbers={**report.numbers, **further})
        except BadReply as fault:
            refused[client] = str(fault)
        except Exception as error:  # due to what the client reports, as in the server's reading
            refused[client] = f"{type(error).__name__}: {error}"
    if not taken:
        return None, taken, refused
    return recorded(folder.mean()), taken, refused


def _like(names: Sequence[str], received: Arrays, result: Fitted | Exception) -> Fitted:
    """Return ``result``; raise its exception, or ``ValueError`` for arrays unlike those received.

    Such arrays would not stack with the other clients'.
    """
    if isinstance(result, Exception):
        raise result
    arrays = [np.asarray(array) for array in result[0]]
    if CODEC in result[2]:  # codes, which are of one size
        return arrays, result[1], result[2]
    if len(arrays) != len(received):
        raise ValueError(f"fit returned {len(arrays)} arrays, {len(received)} were received")
    for name, array, before in zip(names, arrays, received, strict=True):
        if array.shape != before.shape or array.dtype != before.dtype:
            raise ValueError(
                f"fit returned {name!r} as {array.dtype} {array.shape}, received was"
                f" {before.dtype} {before.shape}"
            )
    return arrays, result[1], result[2]


@contextmanager
def _states(context: Context, *, shared: bool) -> Iterator[Callable[[int], Context]]:
    """Yield a function that returns a client's context; at the end keep these contexts' states.

    Hosts of a shared population cannot keep states in their contexts: the next request for a client
    may go to any host.
    """
    contexts: dict[int, Context] = {}
    if isinstance(context, HostContext):

        def fetched(client: int) -> Context:
            contexts[client] = context.fetch(client)
            return contexts[client]

        try:
            yield fetched
        finally:
            for fetched_context in contexts.values():
                context.keep(fetched_context)
        return
    states: dict[str, RecordDict] = {}
    for key, record in context.state.items():
        owner, _, name = key.partition("/")
        states.setdefault(owner, RecordDict())[name] = record

    def context_of(client: int) -> Context:
        contexts[client] = Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config={**context.node_config, "partition-id": client},
            state=states.get(f"{STATE}-{client}", RecordDict()),
            run_config=context.run_config,
        )
        return contexts[client]

    yield context_of
    if shared and (keep := [client for client, its in contexts.items() if its.state]):
        raise ValueError(
            f"clients {keep[:5]} keep a state in context.state, which the hosts of a shared"
            " population do not have in common: give them a DirectoryStore"
        )
    for client, its in contexts.items():
        prefix = f"{STATE}-{client}/"
        for key in [k for k in context.state if k.startswith(prefix)]:
            del context.state[key]
        for key, record in its.state.items():
            context.state[prefix + key] = record


def _few(clients: Sequence[int] | int) -> str:
    if isinstance(clients, int):
        return f"any of {clients}"
    return f"{[*clients[:5]]}{' ...' if len(clients) > 5 else ''}"
