"""The ledger of acknowledgements: which reply of each client the server used last.

Replies get lost, come late or are rejected, and a client does not learn which. So

- each request tells its client the round of its last used reply (``acked-round``, -1 for none), and
  the rounds that a checkpoint would go back to (``kept-rounds``): a client keeps its state of these
  rounds, and undoes the rest;
- a client's state has a nonce, drawn when the state began. A client that reports another nonce than
  the recorded one has lost its state. With ``lost_state`` "reset" or "warn" it is treated as new,
  "warn" with a warning; with "refuse" its replies are rejected;
- after a successful round, the used replies are recorded. A skipped round records none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any, Literal

from fl_strategies.core.log import LOGGER
from fl_strategies.core.reasons import brief
from fl_strategies.core.records import BadReply, Reply, Upload

LostState = Literal["reset", "refuse", "warn"]


@dataclass
class Ledger:
    """By client, the round of its last used reply, and the nonce of its state in that reply."""

    lost_state: LostState = "reset"
    acknowledge: bool = True
    """Whether requests say which reply was used last."""
    kept_rounds: Callable[[int], list[int]] | None = None
    """The rounds of a client's state that checkpoints may go back to; or None."""
    acked: dict[int, int] = field(default_factory=dict)
    nonces: dict[int, str] = field(default_factory=dict)

    def request_fields(self, client: int) -> dict[str, Any]:
        """Return the ledger's part of a request to ``client``."""
        request: dict[str, Any] = {}
        if self.acknowledge:
            request["acked-round"] = self.acked.get(client, -1)
        if self.kept_rounds is not None:
            request["kept-rounds"] = " ".join(map(str, self.kept_rounds(client)))
        return request

    def check(self, reply: Reply, upload: Upload) -> Upload:
        """Return ``upload``, completed by what is recorded of its client.

        A client that lost its acknowledged state is treated as new, or :class:`BadReply` is raised
        with ``lost_state="refuse"``.
        """
        client = upload.client
        nonce, recorded = str(reply.words.get("state-nonce", "")), self.nonces.get(client)
        upload = upload._replace(newcomer=client not in self.acked, nonce=nonce)
        if not (nonce and recorded and nonce != recorded):
            return upload
        if self.lost_state == "refuse":
            raise BadReply("its acknowledged state is lost")
        level = WARNING if self.lost_state == "warn" else INFO
        LOGGER.log(level, "client %s lost its state and is treated as new", brief(client))
        return upload

    def record_used(self, used: Sequence[Upload]) -> None:
        """Record the uploads of a successful round."""
        self.acked = self.acked | {upload.client: upload.round for upload in used}
        self.nonces = self.nonces | {u.client: u.nonce for u in used if u.nonce}

    @property
    def record(self) -> dict[str, Mapping[int, Any]]:
        """The ledger's part of a checkpoint."""
        return {"acked": dict(self.acked), "nonces": dict(self.nonces)}

    def restore(self, record: Mapping[str, Mapping[int, Any]]) -> None:
        """Restore a checkpoint's ``record``."""
        self.acked, self.nonces = dict(record["acked"]), dict(record["nonces"])
