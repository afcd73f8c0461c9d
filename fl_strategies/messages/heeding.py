"""What a request asks of any client, and how a reply says that the client does so.

A client that heeds one of these keys of its request repeats the key in its reply, as a text. Flower
tells a server nothing of it. So the log names once the clients that do not: Flower's own clients
ignore every key that they do not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_strategies.messages.codes import CODEC, DOWNLOAD

STEP_LIMIT = "step-limit"
"""The most local steps of a client that is to be in time (``fl_strategies.parts.deadline``)."""
CHECKSUMS = "checksums"
"""Whether the reply says what the arrays were when the client sent them."""
FINE_TUNE = "fine-tune"
"""Whether an evaluation also measures the model after one step (``local``)."""

UNREAD = "no client says that it reads bfloat16 (download), as clients behind client_app do"
IN_TRAINING: Mapping[str, str] = {
    CODEC: "its whole upload counts, and takes as many bytes as without a codec",
    DOWNLOAD: "to it the model's arrays are no numbers",
    STEP_LIMIT: "its work may take longer than the deadline",
    CHECKSUMS: "nothing shows whether a mod changed its arrays on the way",
}
"""By key of a training request, what follows if the client ignores it."""
IN_EVALUATION: Mapping[str, str] = {
    DOWNLOAD: "to it the model's arrays are no numbers",
    FINE_TUNE: "it measures no model after fine-tuning",
}
"""The same of an evaluation's."""


def asks_to_heed(config: Mapping[str, Any], key: str) -> bool:
    """Return whether a request asks its client to heed ``key``."""
    return config.get(key, "off") not in ("off", 0)
