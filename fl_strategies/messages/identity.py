"""Which algorithm a reply's client ran, and on which model layout.

Flower checks neither. Clients of this package report both. A user's own client that reports nothing
is trusted as far as the algorithm allows, and the log says once what the client may ignore.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fl_strategies.core.layout import Layout
from fl_strategies.core.reasons import brief
from fl_strategies.core.records import BadReply, Reply

FREE = "as with any client"
"""FedAvg's trust in a client that does not say which algorithm it ran."""


@dataclass(frozen=True)
class Identity:
    """The algorithm and layout that replies must have.

    ``trust`` says how far a client is trusted that does not say which algorithm it ran; with ""
    its replies are refused.
    """

    strategy: str
    algorithm: str
    trust: str
    layout: Layout

    @property
    def needs(self) -> str:
        """What clients the strategy needs, and how to have them."""
        return (
            f"{self.strategy} needs clients that run {self.algorithm!r}: put AnyAlgorithmClient"
            " behind client_app"
        )

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
                f"it does not say which algorithm its client ran, and {self.needs}; or, if your own"
                f" client implements it, have it report algorithm={self.algorithm!r} or set"
                " assume_algorithm=True"
            )

    def doubts(self, used: Iterable[Reply], local: Iterable[str]) -> str:
        """Return, if a usable reply names no algorithm, what its client may have ignored, or "".

        ``local`` names the settings of local training that were sent to clients.
        """
        unnamed = [reply.client for reply in used if not reply.words.get("algorithm")]
        settings = sorted(local)
        if not unnamed or not (settings or self.trust != FREE):
            return ""
        ignored = f"; it may ignore the local settings {settings}" if settings else ""
        return (
            f"client {brief(unnamed[0])} does not say which algorithm it ran: {self.strategy}"
            f" trusts it {self.trust}{ignored}"
        )
