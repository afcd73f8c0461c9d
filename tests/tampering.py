"""What a client may send in the place of an honest reply."""

from __future__ import annotations

import io
import logging
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from problems import CLIENT_OF, Quadratic, grid

from clients.node.in_process import InProcessGrid

Tamper = Callable[[RecordDict], RecordDict | Error | None]
"""Makes something else out of an honest reply's content, or changes it."""


def fresh(content: RecordDict) -> RecordDict:
    return RecordDict({name: record.copy() for name, record in content.items()})


def arrays_of(content: RecordDict) -> ArrayRecord:
    return next(iter(content.array_records.values()))


def measured(name: str, value: Any) -> Tamper:
    """Report ``value`` under this name; None: report nothing under it."""

    def tamper(content: RecordDict) -> RecordDict:
        metrics = dict(content["metrics"])
        metrics.pop(name, None)
        content["metrics"] = MetricRecord(metrics if value is None else {**metrics, name: value})
        return content

    return tamper


def put(name: str, array: np.ndarray | Array) -> Tamper:
    """Send ``array`` under this name."""

    def tamper(content: RecordDict) -> RecordDict:
        arrays_of(content)[name] = array if isinstance(array, Array) else Array(array)
        return content

    return tamper


def tampered(
    problems: list[Quadratic], client: int, tamper: Tamper, kind: str = "train"
) -> InProcessGrid:
    """Return a federation in which ``tamper`` changes every reply of ``client`` of this kind."""

    def fault(request: Message, reply: Message) -> Message:
        mine = CLIENT_OF[request.metadata.dst_node_id] == client
        if mine and request.metadata.message_type == kind:
            content = fresh(reply.content)
            tamper(content)
            reply.content = content
        return reply

    return grid(problems, fault=fault)


@contextmanager
def silence() -> Iterator[None]:
    """Log nothing."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


# ---- bytes that should be a NumPy file ----------------------------------------------------------


class Bomb:
    """What runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("something was unpickled",)


def npy(array: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def headed(header: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """Return a NumPy file whose header says what it likes."""
    text = header.encode("latin1") + b"\n"
    length = struct.pack("<H" if version == b"\x01\x00" else "<I", len(text))
    return b"\x93NUMPY" + version + length + text + body


def claims(descr: str, shape: str, body: bytes = b"") -> bytes:
    return headed(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}", body)


def numbers(content: RecordDict, more: dict[str, Any]) -> None:
    content["metrics"] = MetricRecord({**content["metrics"], **more})


def words(content: RecordDict, more: dict[str, Any]) -> None:
    content["config"] = ConfigRecord({**content.config_records.get("config", {}), **more})
