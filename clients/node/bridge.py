"""Any NumPyClient behind Flower's Message API, and behind the legacy one."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Mapping
from logging import DEBUG, ERROR
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common import log
from flwr.common.constant import ErrorCode, SType

from fl_strategies.core.reasons import of_exception
from fl_strategies.server.wire import decode

ClientFn = Callable[[Context], NumPyClient]

ARRAYS, CONFIG, METRICS, CLIENT = "arrays", "config", "metrics", "client"


def client_id(context: Context) -> int:
    """Return the stable id of a client: its ``partition-id`` if it has one, else the node's id."""
    return int(context.node_config.get("partition-id", context.node_id))


def client_app(client_fn: ClientFn, mods: list[Mod] | None = None) -> ClientApp:
    """Return a ClientApp that answers train, evaluate and query messages by a NumPyClient.

    Parameters
    ----------
    client_fn : callable
        ``client_fn(context)`` returns the NumPyClient of this node.
    mods : list, optional
        Flower mods around train and evaluate. Those that clip or add noise work on training alone,
        as Flower documents them.

    Strings and bytes among a client's metrics travel in a ConfigRecord, numbers in the MetricRecord
    (``num-examples`` added; ``evaluate``'s loss as ``eval-loss``). A query is answered with
    ``client-id`` and ``num-partitions``. The same app also answers a legacy ``Server``.

    An exception is answered with Flower's error for it, whose reason is one line, the innermost
    exception first; ``FLWR_LOG_LEVEL=DEBUG`` has the client's own log show the traceback.
    """
    return _BridgedApp(client_fn, mods)


class _BridgedApp(ClientApp):
    def __init__(self, client_fn: ClientFn, mods: list[Mod] | None) -> None:
        super().__init__()
        mods = [_for_training(mod) if _changes_uploads(mod) else mod for mod in mods or []]
        self._legacy = ClientApp(lambda context: client_fn(context).to_client(), mods)

        @self.train(mods=mods)
        def train(message: Message, context: Context) -> Message:
            client = client_fn(context)
            names, arrays, config = _request(message, client)
            trained, examples, metrics = client.fit(arrays, config)
            if len(trained) != len(names):
                raise ValueError(f"fit returned {len(trained)} arrays, {len(names)} were received")
            record = ArrayRecord({n: encoded(a) for n, a in zip(names, trained, strict=True)})
            return _reply(message, examples, metrics, record)

        @self.evaluate(mods=mods)
        def evaluate(message: Message, context: Context) -> Message:
            client = client_fn(context)
            _, arrays, config = _request(message, client)
            loss, examples, metrics = client.evaluate(arrays, config)
            return _reply(message, examples, {"eval-loss": loss, **metrics})

        @self.query()
        def query(message: Message, context: Context) -> Message:
            about: dict[str, Any] = {
                "client-id": client_id(context),
                "num-partitions": int(context.node_config.get("num-partitions", 0)),
            }
            return Message(RecordDict({CLIENT: ConfigRecord(about)}), reply_to=message)

    def __call__(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        legacy = kind in ("get_parameters", "get_properties", "reconnect") or (
            message.has_content()
            and any(key.startswith(("fitins.", "evaluateins.")) for key in message.content)
        )
        try:
            return self._legacy(message, context) if legacy else super().__call__(message, context)
        except Exception as error:
            reason = of_exception(error)
            if not _on_ray():
                log(ERROR, "client %d failed: %s", client_id(context), reason)
            log(DEBUG, "client %d failed", client_id(context), exc_info=error)
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _on_ray() -> bool:
    """Whether this process is one of Ray's, whose lines appear in the server's log."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _changes_uploads(mod: Mod) -> bool:
    return mod in (fixedclipping_mod, adaptiveclipping_mod) or isinstance(mod, LocalDpMod)


def _for_training(mod: Mod) -> Mod:
    """Return ``mod`` around training messages alone: Flower's refuse all others."""

    def around(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return call_next(message, context)
        return mod(message, context, call_next)

    return around


def _request(message: Message, client: NumPyClient) -> tuple[list[str], list[Any], dict[str, Any]]:
    """Return the one ArrayRecord's names and arrays, and the one ConfigRecord, as a new dict.

    The arrays are read-only views of what was received.

    A client that knows the names of its model's arrays (``array_names``, as ours do) must find them
    here, before any others.
    """
    content = message.content
    if len(content.array_records) != 1 or len(content.config_records) > 1:
        raise ValueError(
            "a request holds one ArrayRecord and at most one ConfigRecord, got"
            f" {len(content.array_records)} and {len(content.config_records)}"
        )
    record = next(iter(content.array_records.values()))
    config = dict(next(iter(content.config_records.values()), {}))
    expected = getattr(client, "array_names", list(record))
    if list(record)[: len(expected)] != expected:
        raise ValueError(
            f"the client's model shares arrays {expected}, {list(record)} were received: begin with"
            " ArrayRecord(model.state_dict()) of a FlatModel like the clients'"
        )
    return list(record), [decode(array) for array in record.values()], config


def encoded(array: npt.ArrayLike) -> Array:
    """Return ``array`` as Flower's record of it."""
    values = np.asarray(array, order="C")
    data = b"".join((_header(values.dtype.str, values.shape), values.data))
    return Array(str(values.dtype), values.shape, SType.NUMPY, data)


@functools.lru_cache(maxsize=256)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return what stands before the values in NumPy's format; every round has the same few."""
    file = io.BytesIO()
    about = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


def _reply(
    message: Message, examples: int, metrics: Mapping[str, Any], arrays: ArrayRecord | None = None
) -> Message:
    numbers: dict[str, Any] = {"num-examples": examples}
    words: dict[str, Any] = {}
    for name, value in metrics.items():
        plain = value.item() if isinstance(value, np.generic) else value
        (words if isinstance(plain, str | bytes | bool) else numbers)[name] = plain
    content = RecordDict({METRICS: MetricRecord(numbers)})
    if arrays is not None:
        content[ARRAYS] = arrays
    if words:
        content[CONFIG] = ConfigRecord(words)
    return Message(content, reply_to=message)
