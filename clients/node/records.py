"""What a NumPyClient receives and returns, in Flower's records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from logging import ERROR
from typing import Any, TypeAlias

import numpy as np
from flwr.app import Context
from flwr.client import NumPyClient

from fl_strategies.core.layout import few
from fl_strategies.core.log import log, serves
from fl_strategies.core.reasons import TRACEBACK
from fl_strategies.core.schedules import require
from fl_strategies.messages.codes import DOWNLOAD
from fl_strategies.messages.description import DESCRIBE, DESCRIPTION

ClientFn: TypeAlias = Callable[[Context], NumPyClient]


def make_client(client_fn: ClientFn, context: Context) -> NumPyClient:
    """Return the context's client; raise ``ValueError`` unless it is a NumPyClient.

    A client of this package takes from the context what its maker has not given it.
    """
    client = client_fn(context)
    wanted = "a NumPyClient (without .to_client())"
    require(isinstance(client, NumPyClient), "client_fn's result", wanted, client)
    settle = getattr(client, "in_context", None)
    return client if settle is None else settle(context)


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
    if received[: len(expected)] == expected:
        return
    more = [name for name in expected if name not in received]
    fewer = [name for name in received if name not in expected and "/" not in name]  # no vectors
    how = "begin with ArrayRecord(module.state_dict()) of a module like the clients'"
    if bool(more) != bool(fewer):
        alike = "all clients of a run freeze (requires_grad_(False)) and `share` the same"
        how = (
            f"{few(more)} do not travel in this run: {alike}"
            if more
            else (f"this client does not share {few(fewer)}: {alike}")
        )
    raise ValueError(
        f"the client's model shares arrays {few(expected)}, {few(received)} were received: {how}"
    )


def described(client: NumPyClient) -> dict[str, Any]:
    """Return the client's description of its model; nothing if it knows no descriptions."""
    properties = client.get_properties({DESCRIBE: True})
    return {DESCRIPTION: properties[DESCRIPTION]} if DESCRIPTION in properties else {}


def divided(
    samples: int, metrics: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers and the texts of ``fit``'s or ``evaluate``'s metrics, for the records.

    The client's node has read what ``config`` says of the download.
    """
    numbers: dict[str, Any] = {"num-examples": samples}
    words: dict[str, Any] = {DOWNLOAD: config[DOWNLOAD]} if DOWNLOAD in config else {}
    for name, value in metrics.items():
        plain = value.item() if isinstance(value, np.generic) else value
        (words if isinstance(plain, str | bytes | bool) else numbers)[name] = plain
    return numbers, words


def log_failure(whose: str, reason: str) -> None:
    """Log at the node why clients failed, unless the node's log is the server's, which says it too.

    Log lines of Ray's workers appear in the server's log.
    """
    ray = sys.modules.get("ray")
    if not serves() and (ray is None or not ray.is_initialized()):
        log(ERROR, "%s failed: %s%s", whose, reason, TRACEBACK)
