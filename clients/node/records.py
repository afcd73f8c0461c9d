"""What a NumPyClient receives and returns, in Flower's records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from logging import ERROR
from typing import Any, TypeAlias

import numpy as np
from flwr.app import Context, Error, Message
from flwr.client import NumPyClient

from fl_strategies.core.layout import few
from fl_strategies.core.log import log
from fl_strategies.core.reasons import TRACEBACK
from fl_strategies.core.schedules import require
from fl_strategies.messages.description import DESCRIBE, DESCRIPTION
from fl_strategies.messages.internals import ErrorCode, TaskIdentity

ClientFn: TypeAlias = Callable[[Context], NumPyClient]


def make_client(client_fn: ClientFn, context: Context) -> NumPyClient:
    """Return the context's client; raise ``ValueError`` unless it is a NumPyClient."""
    client = client_fn(context)
    wanted = "a NumPyClient (without .to_client())"
    require(isinstance(client, NumPyClient), "client_fn's result", wanted, client)
    return client


def check_id(client: NumPyClient, context: Context) -> NumPyClient:
    """Return ``client``; raise ``ValueError`` if it takes itself for another client.

    The server knows the client by the context's ``partition-id``. Without a number, and of a client
    that has no ``array_names`` and number, as clients of this package have, nothing is certain.
    """
    known = str(context.node_config.get("partition-id"))
    own_id = getattr(client, "client_id", None) if hasattr(client, "array_names") else None
    if known.isdecimal() and isinstance(own_id, int) and own_id != int(known):
        raise ValueError(
            f"client_id must be the node's partition-id, {known}, got {own_id}: client_id(context)"
            " returns it"
        )
    return client


def check_names(client: NumPyClient, received: list[str]) -> None:
    """Raise ``ValueError`` unless the arrays ``received`` begin with those of the client's model.

    A client without ``array_names``, which clients of this package have, accepts any names.
    """
    expected = getattr(client, "array_names", received)
    if received[: len(expected)] != expected:
        raise ValueError(
            f"the client's model shares arrays {few(expected)}, {few(received)} were received:"
            " begin with ArrayRecord(module.state_dict()) of a module like the clients'"
        )


def described(client: NumPyClient) -> dict[str, Any]:
    """Return the client's description of its model; nothing if it knows no descriptions."""
    properties = client.get_properties({DESCRIBE: True})
    return {DESCRIPTION: properties[DESCRIPTION]} if DESCRIPTION in properties else {}


def divided(samples: int, metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers and the texts of ``fit``'s or ``evaluate``'s metrics, for the records."""
    numbers: dict[str, Any] = {"num-examples": samples}
    words: dict[str, Any] = {}
    for name, value in metrics.items():
        plain = value.item() if isinstance(value, np.generic) else value
        (words if isinstance(plain, str | bytes | bool) else numbers)[name] = plain
    return numbers, words


def log_failure(whose: str, reason: str) -> None:
    """Log at the node why clients failed.

    Ray's workers do not: their log lines appear in the server's log, which says it too.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        log(ERROR, "%s failed: %s%s", whose, reason, TRACEBACK)


def error_reply(request: Message, reason: str) -> Message:
    """Return Flower's error for an exception in the ClientApp, in place of a reply."""
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=request)


def become_server() -> None:
    """Let this process make messages as a ServerApp does; elsewhere Flower's runtime sets this."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
