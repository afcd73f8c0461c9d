"""A legacy server's clients and results, in the terms of Flower's Message API."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common import (
    Code,
    EvaluateRes,
    FitRes,
    GetPropertiesIns,
    Parameters,
    ndarrays_to_parameters,
)
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy

from fl_strategies.core.layout import Layout, conventional_buffers
from fl_strategies.core.records import BadReply
from fl_strategies.core.vectors import Vector
from fl_strategies.messages.wire import decode
from fl_strategies.server.replies import one_line

FAILED = 1
"""Error code of a result whose status is not OK, or which no message can hold."""
NUMPY = "numpy.ndarray"
"""Flower's name for tensors that are NumPy files."""


class Network:
    """What ``Nodes`` needs of a Grid: the ids of the connected clients, and a query to each."""

    def __init__(self, manager: ClientManager) -> None:
        self._manager = manager

    def get_node_ids(self) -> list[int]:
        return list(proxies_of(self._manager))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float) -> list[Message]:
        proxies = proxies_of(self._manager)
        return [
            answer_to(message, proxies[node], functools.partial(_properties, timeout=timeout))
            for message in messages
            if (node := message.metadata.dst_node_id) in proxies
        ]


def node_of(cid: str) -> int:
    """Return the node's id as a number: ``cid``, or 64 bits of its hash if it is not a number."""
    if cid.isascii() and cid.isdecimal() and int(cid) < 2**64:
        return int(cid)
    return int.from_bytes(hashlib.sha256(cid.encode()).digest()[:8], "big")


def proxies_of(manager: ClientManager) -> dict[int, ClientProxy]:
    """Return the connected clients by their nodes' ids."""
    return {node_of(cid): proxy for cid, proxy in manager.all().items()}


def to_parameters(arrays: ArrayRecord) -> Parameters:
    """Return the record's arrays, without their names, in its order."""
    return ndarrays_to_parameters([array.numpy() for array in arrays.values()])


def undecoded(data: object) -> Array:
    """Return a tensor's bytes as a record that the strategy will decode and check."""
    if not isinstance(data, bytes):
        raise BadReply(f"a tensor is a {type(data).__name__}, expected bytes")
    return Array("", (), NUMPY, data)


def initial_model(parameters: Parameters) -> tuple[ArrayRecord, Vector]:
    """Return a client's model, and its floating-point arrays as a vector [d].

    Raises ``ValueError`` if no run can begin with it.
    """
    arrays = {str(i): decode(undecoded(data)) for i, data in enumerate(parameters.tensors)}
    theta = Layout.of(arrays, conventional_buffers(arrays)).pack(arrays)
    return ArrayRecord({name: Array(array) for name, array in arrays.items()}), theta


def answer_to(
    request: Message, result: Any, content: Callable[[Message, Any], RecordDict]
) -> Message:
    """Return ``content(request, result)`` as a reply, or an error reply if that fails."""
    try:
        return Message(content(request, result), reply_to=request)
    except BadReply as error:
        reason = str(error)
    except Exception as error:  # a client has made it raise
        reason = f"{type(error).__name__}: {error}"
    return Message(Error(FAILED, one_line(reason)), reply_to=request)


def check_status(result: Any) -> None:
    """Raise ``BadReply`` for a result whose status is not OK."""
    if result.status.code != Code.OK:
        raise BadReply(result.status.message)


def trained(request: Message, result: FitRes, *, masked: bool = False) -> RecordDict:
    """Return the content of a reply to a training request."""
    check_status(result)
    sent = next(iter(request.content.array_records.values()))
    tensors = result.parameters.tensors
    if len(tensors) != len(sent):
        raise BadReply(f"it has {len(tensors)} arrays, expected {len(sent)}")
    # still bytes: the strategy decodes them, as those of messages
    arrays = {name: undecoded(data) for name, data in zip(sent, tensors, strict=True)}
    if masked:  # the mean of float32 arrays comes as float64
        arrays = {n: Array(decode(a).astype(sent[n].dtype)) for n, a in arrays.items()}
    record = ArrayRecord(arrays)
    return RecordDict({"arrays": record, **_metrics(result, {})})


def evaluated(request: Message, result: EvaluateRes) -> RecordDict:
    """Return the content of a reply to an evaluation request."""
    check_status(result)
    return RecordDict(_metrics(result, {"eval-loss": result.loss}))


def _properties(request: Message, proxy: ClientProxy, *, timeout: float) -> RecordDict:
    config: Any = dict(next(iter(request.content.config_records.values()), {}))
    answer = proxy.get_properties(GetPropertiesIns(config), timeout, None)
    check_status(answer)
    return RecordDict({"client": ConfigRecord(cast(Any, answer.properties))})


def _metrics(result: FitRes | EvaluateRes, further: dict[str, float]) -> dict[str, Any]:
    """Return the result's metrics as records; its samples and ``further`` replace others."""
    metrics = result.metrics
    words: dict[str, Any] = {n: v for n, v in metrics.items() if isinstance(v, str | bytes | bool)}
    numbers: dict[str, Any] = {n: v for n, v in metrics.items() if n not in words}
    return {
        "metrics": MetricRecord({**numbers, **further, "num-examples": result.num_examples}),
        "config": ConfigRecord(words),
    }
