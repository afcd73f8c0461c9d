"""Which reply of each client the server used last: the one place that knows.

Replies get lost, come late or are left out, and a client does not learn which. So

- each request tells its client the round of its last reply that was used (``acked-round``, -1 for
  none), and the rounds that a checkpoint would go back to (``kept-rounds``): a client keeps what it
  did up to these, and undoes the rest;
- a client's state has a nonce, made up when it began. One that reports another nonce than the one
  booked lost its state, and counts by ``lost_state`` as a newcomer, with a warning or without
  ("warn", "reset"), or is left out ("refuse");
- after a round that stands, the replies used are booked. A void round books none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any, Literal

from fl_strategies.core.records import BadReply, Reply, Upload

LostState = Literal["reset", "refuse", "warn"]


@dataclass
class Ledger:
    """By client, the round of its last reply that was used, and the nonce of its state then."""

    lost_state: LostState = "reset"
    acknowledge: bool = True
    """Whether requests say which reply was used last."""
    kept_rounds: Callable[[int], list[int]] | None = None
    """Which rounds of a client's state checkpoints would go back to; None without checkpoints."""
    acked: dict[int, int] = field(default_factory=dict)
    nonces: dict[int, str] = field(default_factory=dict)

    def ask(self, client: int) -> dict[str, Any]:
        """Return what a request tells ``client``."""
        request: dict[str, Any] = {}
        if self.acknowledge:
            request["acked-round"] = self.acked.get(client, -1)
        if self.kept_rounds is not None:
            request["kept-rounds"] = " ".join(map(str, self.kept_rounds(client)))
        return request

    def check(self, reply: Reply, upload: Upload) -> Upload:
        """Return ``upload`` with what is booked of its client.

        Raises :class:`BadReply` for a client that lost the state booked, where that is refused;
        elsewhere the log says that it counts as a newcomer.
        """
        client = upload.client
        nonce, booked = str(reply.words.get("state-nonce", "")), self.nonces.get(client)
        upload = upload._replace(newcomer=client not in self.acked, nonce=nonce)
        if not (nonce and booked and nonce != booked):
            return upload
        if self.lost_state == "refuse":
            raise BadReply("the state which the server booked for it is lost")
        level = WARNING if self.lost_state == "warn" else INFO
        logging.getLogger("flwr").log(
            level, "client %d lost its state and counts as a newcomer", client
        )
        return upload

    def settle(self, used: Sequence[Upload]) -> None:
        """Book the uploads of a round that stands."""
        for upload in used:
            self.acked[upload.client] = upload.round
            if upload.nonce:
                self.nonces[upload.client] = upload.nonce

    @property
    def record(self) -> dict[str, Mapping[int, Any]]:
        """What a checkpoint holds of it."""
        return {"acked": dict(self.acked), "nonces": dict(self.nonces)}

    def restore(self, record: Mapping[str, Mapping[int, Any]]) -> None:
        """Go back to a checkpoint's ``record``."""
        self.acked, self.nonces = dict(record["acked"]), dict(record["nonces"])
