"""What a NumPyClient receives and returns, in Flower's records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.client import NumPyClient


def check_names(client: NumPyClient, received: list[str]) -> None:
    """Raise ``ValueError`` unless the arrays ``received`` begin with those of the client's model.

    A client without ``array_names``, which clients of this package have, accepts any names.
    """
    expected = getattr(client, "array_names", received)
    if received[: len(expected)] != expected:
        raise ValueError(
            f"the client's model shares arrays {expected}, {received} were received: begin with"
            " ArrayRecord(model.state_dict()) of a FlatModel like the clients'"
        )


def divided(samples: int, metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers and the texts of ``fit``'s or ``evaluate``'s metrics, for the records."""
    numbers: dict[str, Any] = {"num-examples": samples}
    words: dict[str, Any] = {}
    for name, value in metrics.items():
        plain = value.item() if isinstance(value, np.generic) else value
        (words if isinstance(plain, str | bytes | bool) else numbers)[name] = plain
    return numbers, words
