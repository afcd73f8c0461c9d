"""Which algorithm a reply's client ran, and on which model layout.

Flower checks neither. Clients of this package report both. A user's own client that reports nothing
is trusted as far as the algorithm allows, and the log says once what the client may ignore.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from fl_strategies.core.layout import Layout
from fl_strategies.core.log import log
from fl_strategies.core.reasons import brief
from fl_strategies.core.records import BadReply, Reply, Upload

FREE = "as with any client"
"""FedAvg's trust in a client that does not say which algorithm it ran."""


@dataclass
class Identity:
    """The algorithm and layout that replies must have.

    ``trust`` says how far a client is trusted that does not say which algorithm it ran; with ""
    its replies are refused.
    """

    strategy: str
    algorithm: str
    trust: str
    layout: Layout | None = None
    warned: bool = False

    def ask(self, client: int) -> dict[str, Any]:
        """Return the algorithm and layout, which each request names."""
        named = {"algorithm": self.algorithm}
        if self.layout is None:
            return named
        frozen = {"frozen": self.layout.frozen_digests} if self.layout.frozen else {}
        return {**named, "layout": self.layout.signature, **frozen}

    def admit(self, client: int, words: Mapping[str, str]) -> None:
        """Raise :class:`BadReply` for a reply of another algorithm, before its arrays are read."""
        ran = words.get("algorithm", "")
        if not ran:
            self._admit_unnamed(client)
        elif ran != self.algorithm:
            raise BadReply(
                f"its client ran {ran!r} and {self.strategy} needs {self.algorithm!r}:"
                " AnyAlgorithmClient runs the algorithm that a request names"
            )
        assert self.layout is not None
        roles = words.get("layout", "")
        if roles and roles != self.layout.signature:
            try:
                difference = self.layout.difference(roles)
            except ValueError as error:
                raise BadReply(f"its layout cannot be read: {error}") from None
            if difference:
                raise BadReply(f"its client's model is another: {difference}")

    def _admit_unnamed(self, client: int) -> None:
        if not self.trust:
            raise BadReply(
                "it does not say which algorithm its client ran, and"
                f" {self.strategy} needs clients that run {self.algorithm!r}: put"
                " AnyAlgorithmClient behind client_app; or, if your own client implements it, have"
                f" it report algorithm={self.algorithm!r} or set assume_algorithm=True"
            )

    def check(self, reply: Reply, upload: Upload) -> Upload:
        """Return ``upload``: :meth:`admit` has already checked it."""
        return upload

    def settle(self, used: Sequence[Upload]) -> None:
        """Nothing to keep."""

    def warn(self, used: Iterable[Reply], local: Iterable[str]) -> None:
        """Warn once, if usable replies name no algorithm, which of ``local`` may be ignored."""
        unnamed = [reply.client for reply in used if not reply.words.get("algorithm")]
        told = sorted(local)
        if not unnamed or self.warned or not (told or self.trust != FREE):
            return
        self.warned = True
        ignored = f"; it may ignore the local settings {told}" * bool(told)
        log(
            WARNING,
            "client %s does not say which algorithm it ran: %s trusts it %s%s",
            brief(unnamed[0]),
            self.strategy,
            self.trust,
            ignored,
        )
